"""The choice of attention's kernel: its table by torch's rules, and what runs on this machine's CPU."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend

from shardvit.data_shards.errors import UserError
from shardvit.pipeline.kernels import attention
from shardvit.pipeline.kernels.attention import AttentionCase, attention_kernels, kernel_that_runs, order_of

ON_CPU = AttentionCase(device="cpu", precision="fp32", heads=2, head_size=16, tokens=17)
H100 = AttentionCase(
    device="cuda", precision="bf16", heads=16, head_size=64, tokens=197, capability=(9, 0), cudnn=91_501
)
FALLBACK = ("efficient", "math")


@pytest.mark.parametrize(
    ("change", "order", "told"),
    [
        ({}, ("cudnn", "flash", *FALLBACK), False),
        ({"capability": (10, 0)}, ("cudnn", "flash", *FALLBACK), False),
        ({"head_size": 80, "tokens": 257, "precision": "fp16"}, ("cudnn", "flash", *FALLBACK), False),
        ({"cudnn": 91_500}, ("flash", "cudnn", *FALLBACK), True),  # wrong for some lengths: torch prefers flash
        ({"tokens": 576, "cudnn": 92_000}, ("flash", "cudnn", *FALLBACK), True),
        ({"tokens": 577, "cudnn": 92_000}, ("cudnn", "flash", *FALLBACK), False),
        ({"tokens": 576, "cudnn": 92_600}, ("cudnn", "flash", *FALLBACK), False),
        ({"tokens": 576, "cudnn": 92_000, "capability": (10, 0)}, ("cudnn", "flash", *FALLBACK), False),
        ({"has_pooling": True, "cudnn": 92_600}, ("flash", "cudnn", *FALLBACK), True),
        ({"capability": (8, 0)}, ("flash", "cudnn", *FALLBACK), False),
        ({"capability": (12, 0)}, ("flash", "cudnn", *FALLBACK), False),
        ({"cudnn": 0}, ("flash", *FALLBACK), False),  # none, or an AMD GPU
        ({"head_size": 192}, ("flash", *FALLBACK), False),
        ({"head_size": 36}, ("flash", "math"), False),  # torch fills up to 40 for flash alone
        ({"head_size": 512}, FALLBACK, True),
        ({"precision": "fp32"}, FALLBACK, True),
        ({"has_learnt_bias": True}, FALLBACK, True),
        ({"has_learnt_bias": True, "head_size": 36}, ("math",), True),
        ({"capability": (7, 5), "precision": "fp16"}, FALLBACK, True),
        ({"capability": (7, 5)}, ("math",), True),
    ],
    ids=str,
)
def test_the_order_on_gpus(change: dict[str, Any], order: tuple[str, ...], told: bool) -> None:
    kernels, reason = order_of(replace(H100, **change))
    assert kernels == order and bool(reason) == told


@pytest.mark.parametrize(("tokens", "first"), [((197, 576), "FLASH"), ((576, 197), "FLASH"), ((197, 99), "CUDNN")])
def test_cudnn_comes_first_if_it_is_right_for_all_lengths(
    tokens: tuple[int, ...], first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "kernel_that_runs", lambda case: first.lower())
    monkeypatch.setattr(attention, "_objections", lambda case, kernel: [])
    cases = [replace(H100, tokens=each, cudnn=92_000) for each in tokens]
    with attention_kernels(cases, asked="auto") as chosen:
        assert torch._C._get_sdp_priority_order()[0] == SDPBackend.__members__[f"{first}_ATTENTION"].value
    assert {each.kernel for each in chosen} == {first.lower()}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("has_learnt_bias", "kernel"), [(False, "flash"), (True, "math")])
def test_what_runs_on_a_cpu_is_what_the_rules_say(precision: Any, has_learnt_bias: bool, kernel: str) -> None:
    case = replace(ON_CPU, precision=precision, has_learnt_bias=has_learnt_bias)
    with attention_kernels([case, replace(case, tokens=5)], asked="auto") as chosen:
        assert [each.kernel for each in chosen] == [kernel] * 2 == [order_of(case)[0][0]] * 2
        assert bool(chosen[0].why_slower) == has_learnt_bias
        assert kernel in chosen[0].describe()


def test_math_is_taken_where_it_is_asked_for_also_in_compiled_code_and_only_then() -> None:
    graphs: list[list[str]] = []

    def record(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        with torch.no_grad():
            made = torch.fx.experimental.proxy_tensor.make_fx(graph)(*inputs)
        graphs.append([str(node.target) for node in made.graph.nodes])
        return graph.forward

    x = torch.randn(2, 2, 17, 16)
    assert kernel_that_runs(ON_CPU) == "flash"
    with attention_kernels([ON_CPU], asked="math") as chosen:
        assert kernel_that_runs(ON_CPU) == "math" == chosen[0].kernel and "engine.attention" in chosen[0].why_slower
        torch.compile(lambda q: functional.scaled_dot_product_attention(q, q, q), backend=record)(x)
    assert kernel_that_runs(ON_CPU) == "flash"
    torch.compile(lambda k: functional.scaled_dot_product_attention(k, k, k), backend=record)(x)
    fused = [any("flash_attention_for_cpu" in name for name in names) for names in graphs]
    assert fused == [False, True]


@pytest.mark.parametrize("asked", ["cudnn", "efficient"])
def test_a_kernel_that_cannot_do_it_is_refused_by_name(asked: Any) -> None:
    with (
        pytest.raises(UserError, match=rf"engine\.attention {asked} .*GPU.* flash"),
        attention_kernels([ON_CPU], asked=asked),
    ):
        pass


def test_flash_for_a_learnt_bias_is_refused() -> None:
    case = replace(ON_CPU, has_learnt_bias=True)
    with (
        pytest.raises(UserError, match=r"engine\.attention flash .*learnt bias.* math"),
        attention_kernels([case], asked="flash"),
    ):
        pass
