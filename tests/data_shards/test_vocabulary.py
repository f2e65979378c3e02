"""Keys of random streams: unique, and never another number, or resumed runs would see other data."""

import ast
from pathlib import Path

from shardvit.data_shards.vocabulary import RandomStream

ROOT = Path(__file__).parents[2]


NUMBERS = """
SHARD_ORDER=1 WINDOW_SHUFFLE=2 AUGMENT=3 DROPOUT=4 MIX=7 SUBSTITUTE=11 SET_SEED=12 PATTERN_TIMES=13 HOLD_OUT=14
HOLD_OUT_SHARDS=15 CORRUPTION_TRAIN=21 CORRUPTION_HELD_OUT=22 HIDDEN_TRAIN=23 HIDDEN_HELD_OUT=24 CROP_ATTEMPTS=31
RAND_AUGMENT=32 COLOR_JITTER=33 ERASING=34 ERASING_NOISE=35 DROPOUT_BY_SAMPLE=41 FEW_SHOT=51 TRANSFER_IMAGES=52
TRANSFER_HOLD_OUT=53 OVERVIEW=61 OWN_TASK=71
"""


def test_the_numbers_of_the_streams_never_change():
    assert [f"{stream.name}={stream}" for stream in RandomStream] == NUMBERS.split()
    assert len(set(map(int, RandomStream))) == len(RandomStream)


def test_every_use_of_a_seed_names_its_stream():
    uses = set()
    for package in ("data_shards", "model", "pipeline", "launch"):
        for file in sorted((ROOT / package).rglob("*.py")):
            if file.name == "randomness.py" or "bench" in file.parts:
                continue
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("hash_words", "uniforms"):
                    uses.add(ast.unparse(node.args[0]))
    # "*key" is draw_corruption's; its two callers name their streams
    of_corruption = {"RandomStream.CORRUPTION_TRAIN", "RandomStream.CORRUPTION_HELD_OUT"}
    assert uses | of_corruption == {"*key", *(f"RandomStream.{stream.name}" for stream in RandomStream)}
