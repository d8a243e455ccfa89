"""A loop of the shape of RL post-training on Ray: actors on each node play, the driver learns.

    python ray_loop.py OUTPUT STEPS [CHECKPOINT]

The driver hands its weights to the actors, each plays a game of its own with them, and the mean of
what they learned is the next step. The same numbers come out whatever is interrupted: a game
depends on the step and the actor alone. Saves `step-N.json` every 10 steps, and on SIGTERM.
"""

import json
import os
import random
import signal
import sys
import time

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

SAVE_EVERY_STEPS = 10


@ray.remote(num_cpus=1)
class Player:
    def __init__(self, number):
        self.number = number

    def play(self, step, weights):
        """One game: how far the weights are from a moving aim, and the way towards it."""
        chance = random.Random(1000 * step + self.number)
        gradient = [w - i + chance.gauss(0.0, 0.1) for i, w in enumerate(weights)]
        time.sleep(float(os.environ.get("STEP_SECONDS", "0.05")))
        return sum(g * g for g in gradient) / len(gradient), gradient


def save(output, step, weights):
    """Write under another name first: what has the right name is whole."""
    path = os.path.join(output, f"step-{step}.json")
    with open(path + ".part", "w") as stream:
        json.dump({"step": step, "weights": weights}, stream)
    os.rename(path + ".part", path)


def main(output, steps, checkpoint=None):
    ray.init()
    # after ray.init(), which sets a handler of its own
    asked = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
    step, weights = 0, [0.0] * 8
    if checkpoint:
        with open(checkpoint) as stream:
            state = json.load(stream)
        step, weights = state["step"], state["weights"]
    nodes = sorted(node["NodeID"] for node in ray.nodes() if node["Alive"])
    print(f"{len(nodes)} nodes", flush=True)
    places = [NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes]
    players = [
        Player.options(scheduling_strategy=places[n % len(places)]).remote(n) for n in range(2)
    ]
    while step < steps:
        step += 1
        games = ray.get([player.play.remote(step, weights) for player in players])
        loss = sum(one for one, _ in games) / len(games)
        ways = zip(*(way for _, way in games), strict=True)
        means = [sum(values) / len(games) for values in ways]
        weights = [w - 0.05 * way for w, way in zip(weights, means, strict=True)]
        print(f"step {step} loss {loss!r}", flush=True)
        if step % SAVE_EVERY_STEPS == 0 or step == steps or asked:
            save(output, step, weights)
        if asked:
            break


main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
