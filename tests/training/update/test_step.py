"""One step: the loss is the mean over tokens, whatever the micro-batches."""

import pytest
import torch
import torch.nn.functional as F
import transformers

from ropewalk import PackedLayout, RopewalkError, Row
from ropewalk.attention.layout import IGNORED, next_token_labels
from ropewalk.models.compute.losses import LossModel, OutputHead
from ropewalk.models.load import attach
from ropewalk.training.recipe.recipe import Optimizer
from ropewalk.training.update.optimizer import MasterAdamW
from ropewalk.training.update.step import ForwardPass, micro_batches, train_step


def tiny_model():
    config = transformers.LlamaConfig(
        vocab_size=31,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    attach(model)
    return LossModel(model, OutputHead.of(model)).train()


def rows_of_uneven_targets():
    """Rows whose numbers of trained tokens differ, so that a mean of means would show."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for lengths in ([23], [1] * 20 + [3], [10, 13], [2] * 11 + [1]):
        layout = PackedLayout.from_lengths(lengths, "anchor")
        ids = torch.randint(0, 31, (24,), generator=generator)
        rows.append(Row(ids, next_token_labels(ids, layout), layout))
    return rows


def one_step(rows_per_batch, rows, precision="float32"):
    model = tiny_model()
    optimizer = MasterAdamW(model.named_parameters(), Optimizer())
    result = train_step(model, micro_batches(rows, rows_per_batch), optimizer, 1e-2, ForwardPass(precision))
    return result, torch.cat([p.detach().flatten() for p in model.parameters()])


def test_loss_is_the_sum_over_all_tokens_by_their_number():
    rows = rows_of_uneven_targets()
    result, _ = one_step(1, rows)
    model = tiny_model()
    total = count = 0
    for row in rows:
        with torch.no_grad():
            logits = model.model(row.input_ids[None], layout=row.layout).logits[0]
        total += float(F.cross_entropy(logits, row.labels, reduction="sum", ignore_index=IGNORED))
        count += int((row.labels != IGNORED).sum())
    assert result.trained_tokens == count
    assert result.tokens == 96
    # Sums of 48 float32 losses of about 3.4 in another order.
    assert result.loss == pytest.approx(total / count, rel=1e-5)
    means = [one_step(1, [row])[0].loss for row in rows]
    assert abs(sum(means) / len(means) - result.loss) > 1e-3


def test_micro_batches_change_nothing_but_rounding():
    rows = rows_of_uneven_targets()
    (alone, weights), (together, same_weights) = one_step(1, rows), one_step(4, rows)
    assert alone.loss == pytest.approx(together.loss, rel=1e-6)
    assert alone.grad_norm == pytest.approx(together.grad_norm, rel=1e-5)
    # Adam's first step is the sign of the gradient: a gradient of rounding size may flip.
    assert ((weights - same_weights).abs() > 1e-5).float().mean() < 0.01


def test_bfloat16_autocast_is_close_to_float32():
    rows = rows_of_uneven_targets()
    exact, rounded = one_step(2, rows)[0], one_step(2, rows, "bfloat16-autocast")[0]
    assert exact.loss != rounded.loss
    assert exact.loss == pytest.approx(rounded.loss, rel=torch.finfo(torch.bfloat16).eps)


def test_a_loss_that_is_no_number_leaves_the_weights_alone():
    model = tiny_model()
    optimizer = MasterAdamW(model.named_parameters(), Optimizer())
    with torch.no_grad():
        model.model.model.norm.weight[0] = float("nan")
    before = [p.detach().clone() for p in model.parameters()]
    result = train_step(model, micro_batches(rows_of_uneven_targets()), optimizer, 1e-2)
    assert not result.applied
    for a, b in zip(before, model.parameters(), strict=True):
        assert torch.equal(a.nan_to_num(), b.nan_to_num())


def test_rows_without_a_target_are_refused():
    layout = PackedLayout.from_lengths([1] * 23, "anchor")
    ids = torch.zeros(24, dtype=torch.int64)
    row = Row(ids, next_token_labels(ids, layout), layout)
    with pytest.raises(RopewalkError, match="every document is either a single token or a chat"):
        one_step(1, [row])
