"""What is counted along long texts, and what another model says of them."""

from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.longtext import PROMPT, WINDOW, decode, judged
from benchmarks.targets import alone, drafted
from tests.support.random_cases import make_model

PROMPTS = torch.randint(2, 50, (3, PROMPT), generator=torch.Generator().manual_seed(1))


def judge(vocab_size: int, **more: Any) -> Qwen3ForCausalLM:
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 8,
    }
    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(vocab_size=vocab_size, num_key_value_heads=1, **sizes, **more)
    ).eval()


@pytest.mark.parametrize("sampled", [False, True])
def test_counts_along_a_text(sampled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """`static` makes a token a forward in every window. Drafts make the same texts, and windows
    hold all rounds."""
    model, new = make_model(), 2 * WINDOW
    static, line = decode(model, PROMPTS, new, 2, do_sample=sampled, **alone("static"))
    assert line["along"]["row_forwards"] == [3 * WINDOW] * 2
    assert line["along"]["drafted"] == [0, 0]
    assert static.forwards == [new] * 3
    outs, generate = list[Any](), model.generate
    monkeypatch.setattr(
        model,
        "generate",
        lambda *given, **options: outs.append(generate(*given, **options)) or outs[-1],
    )
    made, line = decode(
        model, PROMPTS, new, 2, do_sample=sampled, **drafted("mrp_spec", "static", 4)
    )
    assert made.differ(static) == 0
    assert sum(line["along"]["row_forwards"]) == sum(made.forwards) < 3 * new
    for name in ("drafted", "accepted"):
        assert (
            0
            < min(line["along"][name])
            < sum(line["along"][name])
            == sum(int(out.stats[name].sum()) for out in outs)
        )


def test_what_another_model_says() -> None:
    model = judge(64, initializer_range=1.0)
    texts = torch.cat([PROMPTS[:2], PROMPTS[:2], torch.arange(64).expand(2, -1)], 1)
    texts[1, PROMPT : PROMPT + WINDOW] = 7
    said = judged(model, texts)
    with torch.no_grad():
        losses = [
            [
                -model(text[None, :at]).logits[0, -1].log_softmax(-1)[text[at]].item()
                for at in range(PROMPT, len(text))
            ]
            for text in texts
        ]
    nats = torch.tensor(losses)
    assert said["nats"] == pytest.approx(nats.mean().item(), abs=1e-3)
    assert said["nats_along"] == pytest.approx(
        [nats[:, :WINDOW].mean().item(), nats[:, WINDOW:].mean().item()], abs=2e-3
    )
    # 61 times four sevens in one text
    assert said["repeated"] == pytest.approx((60 / 125) / 2, abs=1e-3)
