"""tenants, API keys and adapters

Revision: 0001
Revises: -
Created: 2026-11-29
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "tenants",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("weight", sa.Double(), nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tenants")),
        sa.UniqueConstraint("name", name=op.f("uq_tenants_name")),
        sa.CheckConstraint("weight > 0", name=op.f("ck_tenants_weight_positive")),
        sa.CheckConstraint("status IN ('active', 'suspended')", name=op.f("ck_tenants_status_known")),
    )
    op.create_table(
        "api_keys",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("tenant_id", sa.String(32), nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("env", sa.String(16), nullable=False),
        sa.Column("secret_hmac", sa.LargeBinary(32), nullable=False),
        sa.Column("scopes", sa.String(256), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True)),
        sa.Column("revoked_at", sa.DateTime(timezone=True)),
        sa.Column("last_used_at", sa.DateTime(timezone=True)),
        sa.Column("replaced_by", sa.String(32)),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_api_keys")),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_api_keys_tenant_id_tenants")),
    )
    op.create_index(op.f("ix_api_keys_tenant_id_created_at_id"), "api_keys", ["tenant_id", "created_at", "id"])
    op.create_table(
        "adapters",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("tenant_id", sa.String(32), nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("base_model", sa.String(255), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_adapters")),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_adapters_tenant_id_tenants")),
        sa.UniqueConstraint("tenant_id", "name", "version", name=op.f("uq_adapters_tenant_id_name_version")),
        sa.CheckConstraint("version >= 1", name=op.f("ck_adapters_version_positive")),
        sa.CheckConstraint("status IN ('ready', 'retired')", name=op.f("ck_adapters_status_known")),
    )
    op.create_index(op.f("ix_adapters_tenant_id_created_at_id"), "adapters", ["tenant_id", "created_at", "id"])
    op.create_index(op.f("ix_adapters_digest"), "adapters", ["digest"])


def downgrade() -> None:
    op.drop_table("adapters")
    op.drop_table("api_keys")
    op.drop_table("tenants")
