"""HTTP front door: JSON in, tokens to the engine, text out; sees the engine as EngineGateway."""
