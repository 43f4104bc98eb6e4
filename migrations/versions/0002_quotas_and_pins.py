"""quotas and pins

Revision: 0002
Revises: 0001
Created: 2026-11-29
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "quotas",
        sa.Column("tenant_id", sa.String(32), nullable=False),
        sa.Column("reserved_blocks", sa.Integer(), nullable=False),
        sa.Column("limit_blocks", sa.Integer()),
        sa.Column("pin_limit_blocks", sa.Integer(), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("tenant_id", name=op.f("pk_quotas")),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_quotas_tenant_id_tenants")),
        sa.CheckConstraint(
            "0 <= pin_limit_blocks AND pin_limit_blocks <= reserved_blocks",
            name=op.f("ck_quotas_pins_out_of_reserved"),
        ),
        sa.CheckConstraint(
            "limit_blocks IS NULL OR limit_blocks >= reserved_blocks", name=op.f("ck_quotas_limit_covers_reserved")
        ),
    )
    op.create_table(
        "pins",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("tenant_id", sa.String(32), nullable=False),
        sa.Column("model", sa.String(256), nullable=False),
        sa.Column("adapter_digest", sa.String(64)),
        sa.Column("model_digest", sa.String(64), nullable=False),
        sa.Column("token_ids", sa.LargeBinary(), nullable=False),
        sa.Column("floor", sa.String(8), nullable=False),
        sa.Column("blocks", sa.Integer(), nullable=False),
        sa.Column("clipped_blocks", sa.Integer(), nullable=False),
        sa.Column("ttl_s", sa.Double(), nullable=False),
        sa.Column("hard_max_s", sa.Double(), nullable=False),
        sa.Column("hits", sa.Integer(), nullable=False),
        sa.Column("last_hit_at", sa.DateTime(timezone=True)),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_pins")),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_pins_tenant_id_tenants")),
        sa.CheckConstraint("blocks >= 1", name=op.f("ck_pins_blocks_positive")),
    )
    op.create_index(op.f("ix_pins_tenant_id_created_at_id"), "pins", ["tenant_id", "created_at", "id"])
    op.create_index(op.f("ix_pins_expires_at"), "pins", ["expires_at"])
    op.create_table(
        "kv_pools",
        sa.Column("name", sa.String(32), nullable=False),
        sa.Column("capacity_blocks", sa.Integer(), nullable=False),
        sa.Column("coverable_blocks", sa.Integer(), nullable=False),
        sa.Column("block_bytes", sa.BigInteger(), nullable=False),
        sa.Column("block_tokens", sa.Integer(), nullable=False),
        sa.Column("seen_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_kv_pools")),
    )


def downgrade() -> None:
    op.drop_table("kv_pools")
    op.drop_table("pins")
    op.drop_table("quotas")
