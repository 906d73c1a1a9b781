"""Claude Code, of the Claude Agent SDK."""

from claude_agent_sdk import ClaudeAgentOptions, query

ENVIRONMENT = {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}  # no request that names the session


async def run(question, answer):
    options = ClaudeAgentOptions(model="policy", allowed_tools=["Bash"], env=ENVIRONMENT)
    results = [
        message.result async for message in query(prompt=question, options=options) if hasattr(message, "result")
    ]
    return float(answer in str(results[-1]))
