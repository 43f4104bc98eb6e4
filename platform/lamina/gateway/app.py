"""Puts the gateway together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

import lamina
from lamina.errors import LaminaError
from lamina.gateway.deps import GatewayDeps
from lamina.gateway.errors import respond
from lamina.gateway.housekeeping import keep_house, sweep
from lamina.gateway.middleware import Door
from lamina.gateway.policy import PolicyKeeper
from lamina.gateway.routes import adapters, chat, completions, files, models, operator, ops, parts, pins, tokenize

__all__ = ["create_app"]


def create_app(deps: GatewayDeps) -> FastAPI:
    """The ASGI application. It owns none of `deps`: who made them closes them."""
    app = FastAPI(
        title="Lamina",
        version=lamina.__version__,
        description="OpenAI-compatible API for one base model and each tenant's own adapters.",
        docs_url=None,  # it would load scripts from a foreign host; see /openapi.json
        redoc_url=None,
        lifespan=_lifespan,
        redirect_slashes=False,
    )
    app.state.deps = deps
    for kind in (LaminaError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, _on_error)
    app.add_middleware(Door, deps=deps)
    for module in (chat, completions, models, adapters, files, parts, pins, tokenize, operator, ops):
        app.include_router(module.router)
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    deps: GatewayDeps = app.state.deps
    await sweep(deps)
    keeping = [asyncio.create_task(keep_house(deps)), asyncio.create_task(PolicyKeeper(deps).run())]
    try:
        yield
    finally:
        for task in keeping:
            task.cancel()
        await asyncio.gather(*keeping, return_exceptions=True)


async def _on_error(request: Request, exc: Exception) -> Response:
    return respond(exc, request)
