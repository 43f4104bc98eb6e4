"""quotas of host memory and store

Tables are made anew and filled from a copy, because SQLite adds no constraint to a table that there is.

Revision: 0003
Revises: 0002
Created: 2026-11-30
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    _set_aside("quotas")
    op.create_table(
        "quotas",
        *_quota_columns(),
        sa.Column("host_reserved_bytes", sa.BigInteger(), nullable=False),
        sa.Column("host_limit_bytes", sa.BigInteger()),
        sa.Column("host_pin_limit_bytes", sa.BigInteger(), nullable=False),
        sa.Column("store_reserved_bytes", sa.BigInteger(), nullable=False),
        sa.Column("store_limit_bytes", sa.BigInteger()),
        sa.Column("updated_at", sa.DateTime(timezone=True), nullable=False),
        *_quota_rules(),
        _check(
            "host_pins_out_of_reserved", "0 <= host_pin_limit_bytes AND host_pin_limit_bytes <= host_reserved_bytes"
        ),
        _check("host_limit_covers_reserved", "host_limit_bytes IS NULL OR host_limit_bytes >= host_reserved_bytes"),
        _check("store_reserved_not_negative", "0 <= store_reserved_bytes"),
        _check("store_limit_covers_reserved", "store_limit_bytes IS NULL OR store_limit_bytes >= store_reserved_bytes"),
    )
    old = "tenant_id, reserved_blocks, limit_blocks, pin_limit_blocks, updated_at"
    new = "host_reserved_bytes, host_pin_limit_bytes, store_reserved_bytes"
    _bring_back("quotas", into=f"{old}, {new}", values=f"{old}, 0, 0, 0")

    _set_aside("kv_pools")
    op.create_table(
        "kv_pools",
        sa.Column("name", sa.String(32), nullable=False),
        sa.Column("capacity", sa.BigInteger()),
        sa.Column("coverable", sa.BigInteger()),
        *_pool_columns(),
    )
    same = "name, block_bytes, block_tokens, seen_at"
    _bring_back("kv_pools", into=f"{same}, capacity, coverable", values=f"{same}, capacity_blocks, coverable_blocks")


def downgrade() -> None:
    _set_aside("kv_pools")
    op.create_table(
        "kv_pools",
        sa.Column("name", sa.String(32), nullable=False),
        sa.Column("capacity_blocks", sa.Integer(), nullable=False),
        sa.Column("coverable_blocks", sa.Integer(), nullable=False),
        *_pool_columns(),
    )
    same = "name, block_bytes, block_tokens, seen_at"
    _bring_back(
        "kv_pools",
        into=f"{same}, capacity_blocks, coverable_blocks",
        values=f"{same}, capacity, coverable",
        where="name = 'device'",
    )

    _set_aside("quotas")
    op.create_table(
        "quotas",
        *_quota_columns(),
        sa.Column("updated_at", sa.DateTime(timezone=True), nullable=False),
        *_quota_rules(),
    )
    old = "tenant_id, reserved_blocks, limit_blocks, pin_limit_blocks, updated_at"
    _bring_back("quotas", into=old, values=old)


def _set_aside(table: str) -> None:
    op.execute(f"CREATE TABLE {table}_kept AS SELECT * FROM {table}")  # noqa: S608 - our own names
    op.drop_table(table)


def _bring_back(table: str, *, into: str, values: str, where: str = "1 = 1") -> None:
    op.execute(f"INSERT INTO {table} ({into}) SELECT {values} FROM {table}_kept WHERE {where}")  # noqa: S608 - our own
    op.drop_table(f"{table}_kept")


def _quota_columns() -> list[sa.Column[object]]:
    return [
        sa.Column("tenant_id", sa.String(32), nullable=False),
        sa.Column("reserved_blocks", sa.Integer(), nullable=False),
        sa.Column("limit_blocks", sa.Integer()),
        sa.Column("pin_limit_blocks", sa.Integer(), nullable=False),
    ]


def _quota_rules() -> list[sa.Constraint]:
    return [
        sa.PrimaryKeyConstraint("tenant_id", name=op.f("pk_quotas")),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_quotas_tenant_id_tenants")),
        _check("pins_out_of_reserved", "0 <= pin_limit_blocks AND pin_limit_blocks <= reserved_blocks"),
        _check("limit_covers_reserved", "limit_blocks IS NULL OR limit_blocks >= reserved_blocks"),
    ]


def _check(name: str, rule: str) -> sa.CheckConstraint:
    return sa.CheckConstraint(rule, name=op.f(f"ck_quotas_{name}"))


def _pool_columns() -> list[sa.Column[object] | sa.Constraint]:
    return [
        sa.Column("block_bytes", sa.BigInteger(), nullable=False),
        sa.Column("block_tokens", sa.Integer(), nullable=False),
        sa.Column("seen_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_kv_pools")),
    ]
