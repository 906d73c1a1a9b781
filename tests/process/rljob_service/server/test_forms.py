"""Forms of functions through a real server: what /v1/info reports, and requests with and without token ids."""

FACTORY = """
def get_length_reward(limit):
    def length_reward(completion_ids, **kwargs):
        return [float(len(ids) <= limit) for ids in completion_ids]
    return length_reward
"""


def test_factory_whose_function_reads_token_ids(start_server):
    function = {"inline": FACTORY, "entrypoint": "get_length_reward", "factoryArgs": {"limit": 2}}
    server = start_server(None, function=function, slots=1)
    info = server.request("GET", "/v1/info")[1]
    assert (info["signature"], info["reads"]) == ("trl", ["tokens", "whole"])
    scores = [server.score("x", prompt_ids=[1], completion_ids=[5] * length)["score"] for length in (1, 2, 3)]
    assert scores == [1.0, 1.0, 0.0]
    without = server.score("x")
    assert (without["valid"], without["reason"]) == (False, "exception")
    assert "completion_ids, which the function reads; the trainer sends it" in without["message"]


def test_columns_are_mapped_by_hand(start_server):
    function = {"inline": "def grade(text, gold): return float(text == gold)", "entrypoint": "grade"}
    server = start_server(
        None, function=function | {"columns": {"text": "completion", "gold": "ground_truth"}}, slots=1
    )
    assert [server.score(text, ground_truth="4")["score"] for text in ("4", "5")] == [1.0, 0.0]
    assert "tokens" not in server.request("GET", "/v1/info")[1]["reads"]
