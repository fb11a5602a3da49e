"""Requests in, tokens out: `engine` drives `scheduler` (which tokens next, where) and `runner` (the device)."""

from models.engine.engine import Engine as Engine
from models.engine.engine import EngineConfig as EngineConfig
from models.engine.outputs import RequestOutput as RequestOutput
from models.engine.request import SamplingParams as SamplingParams
