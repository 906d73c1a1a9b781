"""What the head starts for each type of agent."""

import socket
from contextlib import AsyncExitStack

import pytest

from rljob_api.errors import UserError
from rljob_api.manifest.job import RLJobSpec
from rljob_api.wire.contract import PORT_GATEWAY
from rljob_trainer.agents import HostedLoop
from rljob_trainer.head.agent import start_agent
from rljob_trainer.history.prometheus import PrometheusMetrics
from tests.support.driver_harness import NETWORK

FUNCTION = {"function": {"inline": "x"}}
ADDRESS = f"{NETWORK}.251.1"


class Tokenizer:
    chat_template = "{{ messages }}"


def build_spec(agent, rewards=1):
    return RLJobSpec.model_validate(
        {
            "model": {"source": "/m"},
            "data": {"train": {"source": "/d"}, "format": "chat"},
            "rewards": [{"name": "r", **FUNCTION}] * rewards,
            "agent": agent,
        }
    )


def accepts_connections():
    with socket.socket() as client:
        return client.connect_ex((ADDRESS, PORT_GATEWAY)) == 0


@pytest.mark.parametrize("agent", [{}, {"type": "loop", "user": FUNCTION}])
async def test_agent_without_a_runner_has_no_gateway(agent):
    async with AsyncExitStack() as stack:
        parts = await start_agent(stack, build_spec(agent), Tokenizer(), 64, None, ADDRESS, PrometheusMetrics())
        assert (parts.gateway, parts.template is None) == (None, not agent)
        assert not accepts_connections()


async def test_turns_have_the_variables_of_the_chat_template():
    spec = build_spec({"type": "loop", "user": FUNCTION})
    spec.data.chat_template_arguments = {"enable_thinking": False}
    given = []

    class Recorder(Tokenizer):
        def apply_chat_template(self, messages, **options):
            given.append(options)
            return "x"

    async with AsyncExitStack() as stack:
        parts = await start_agent(stack, spec, Recorder(), 64, None, ADDRESS, PrometheusMetrics())
        parts.template.render([{"role": "user", "content": "?"}], [], generate=True)
    assert given[-1]["enable_thinking"] is False


async def test_gateway_of_a_program_listens_on_the_heads_address_until_the_end():
    program = {"type": "program", "runner": FUNCTION}
    async with AsyncExitStack() as stack:
        parts = await start_agent(stack, build_spec(program), Tokenizer(), 64, None, ADDRESS, PrometheusMetrics())
        assert isinstance(parts.loop, HostedLoop)
        assert parts.gateway.url == f"http://{ADDRESS}:{PORT_GATEWAY}"
        assert accepts_connections()
    assert not accepts_connections()


async def test_program_needs_a_chat_template():
    async with AsyncExitStack() as stack:
        with pytest.raises(UserError, match="has no chat template"):
            await start_agent(
                stack,
                build_spec({"type": "program", "runner": FUNCTION}),
                object(),
                64,
                None,
                ADDRESS,
                PrometheusMetrics(),
            )
