"""The gateway over running services and an engine client."""

from __future__ import annotations

import asyncio
import time

from fastapi import FastAPI

from lamina.config import EngineConfig, GatewayConfig, TenancyConfig
from lamina.engine.protocol import EngineClient
from lamina.gateway.app import create_app
from lamina.gateway.deps import GatewayDeps
from lamina.models.tokenizer import Tokenizer
from lamina.wiring.services import Services

__all__ = ["build_gateway"]


async def build_gateway(
    client: EngineClient,
    services: Services,
    *,
    gateway: GatewayConfig,
    tenancy: TenancyConfig,
    engine: EngineConfig,
) -> FastAPI:
    """The ASGI application. Raises UnsupportedModel if the model's tokenizer cannot be used."""
    tokenizer = await asyncio.to_thread(Tokenizer.from_folder, engine.model)
    return create_app(
        GatewayDeps(
            engine=client,
            tokenizer=tokenizer,
            keys=services.keys,
            adapters=services.adapters,
            quotas=services.quotas,
            pins=services.pins,
            operator=services.operator,
            config=gateway,
            base_model=engine.name,
            uploads=tenancy.uploads,
            created=int(time.time()),
        )
    )
