"""Commands that train nothing answer soon: none imports a heavy library that it does not need."""

import subprocess
import sys

import pytest

from tests.conftest import ROOT

HEAVY = (
    *("torch", "torchvision", "timm", "accelerate", "deepspeed", "mlflow", "sklearn", "transformers", "jax"),
    *("pandas", "matplotlib", "scipy", "huggingface_hub", "wandb", "tensorboard"),
)
HELP = "from shardvit.launch.cli import app; app([*{words}, '--help'], result_action='return_value')"
PLAN = "from shardvit.launch.commands.training.plan import PlanOptions, plan; "
PLAN += "plan('digits', options=PlanOptions(gpu='h200'))"
LIBRARIES = "from shardvit.launch.doctor.libraries import library_checks, read_requirements; "
LIBRARIES += "assert {each.verdict for each in library_checks(read_requirements()[1])} <= {'fine', 'note'}"


@pytest.mark.parametrize(
    ("code", "more"),
    [
        pytest.param("import shardvit", ("numpy", "yaml", "pydantic", "rich", "asyncio"), id="import shardvit"),
        pytest.param(PLAN, (), id="plan"),
        pytest.param(
            "from shardvit.launch.commands.training.recipes import listing; listing()", ("numpy",), id="recipes"
        ),
        pytest.param("import shardvit.launch.commands.models.predict", ("numpy",), id="predict"),
        *(
            pytest.param(HELP.format(words=words), ("rich.live", "shardvit.launch.watch.page"), id=f"{words} --help")
            for words in ((), ("run",), ("pack",))
        ),
        pytest.param(LIBRARIES, (), id="doctor's versions"),
    ],
)
def test_nothing_heavy_is_imported(code: str, more: tuple[str, ...]):
    script = f"import sys; {code}; print('imported:', sorted({ {*HEAVY, *more} } & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.stdout.endswith("imported: []\n"), done.stdout[-500:] + done.stderr
