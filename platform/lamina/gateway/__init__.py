"""The HTTP door: OpenAI's contract over an `EngineClient`. Start reading at `app.create_app`."""
