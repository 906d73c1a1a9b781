"""A rollout of ART, which plays tic-tac-toe."""

import random

import art
from rollout import TicTacToeScenario, rollout


async def run(base_url, api_key, model, seed):
    random.seed(seed)  # the game of an episode is the same whenever it is played
    policy = art.Model(name=model, project="rljob", inference_base_url=base_url, inference_api_key=api_key)
    trajectory = await rollout(policy, TicTacToeScenario(step=0))
    return trajectory.reward, trajectory.metrics
