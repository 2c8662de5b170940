"""`fp8_ds_mla` records: where the bytes are, and how much is lost."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvplugin.kernels.records import (
    RECORD_BYTES,
    SMALLEST_SCALE,
    pack_ds_mla,
    round_to,
    unpack_ds_mla,
)

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def latent(tokens: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    kv_c = torch.randn(tokens, 512, generator=generator)
    return kv_c, torch.randn(tokens, 64, generator=generator)


def check_loss(kv_c: Tensor, records: Tensor) -> None:
    """The bound that `pack_ds_mla` promises."""
    scales = records[:, 512:528].contiguous().view(torch.float32).double()
    scales = scales.repeat_interleave(128, dim=1)
    exact = kv_c.double()
    bound = torch.maximum(exact.abs() / 16, scales / 1024) * (1 + 1e-6)
    got = unpack_ds_mla(records)[0].double()
    assert (got - exact).abs().le(bound).all()


def test_bytes_of_a_record() -> None:
    kv_c, k_pe = torch.zeros(1, 512), torch.arange(64.0)[None]
    kv_c[0, 0], kv_c[0, 1] = -896.0, 2.0
    kv_c[0, 129] = 224.0
    record = pack_ds_mla(kv_c, k_pe)[0]
    assert record.shape == (656,)
    # -448, 1 and 448 in e4m3.
    assert record[[0, 1, 129]].tolist() == [0xFE, 0x38, 0x7E]
    assert record[:512].count_nonzero() == 3
    scales = record[512:528].view(torch.float32)
    assert scales.tolist() == [2.0, 0.5, SMALLEST_SCALE, SMALLEST_SCALE]
    assert torch.equal(record[528:].view(torch.bfloat16), k_pe[0].bfloat16())


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 33])
def test_there_and_back(dtype: torch.dtype, tokens: int) -> None:
    kv_c, k_pe = (part.to(dtype) for part in latent(tokens))
    records = pack_ds_mla(kv_c, k_pe)
    assert (records.dtype, records.shape) == (torch.uint8, (tokens, RECORD_BYTES))
    check_loss(kv_c, records)
    back, rope = unpack_ds_mla(records)
    assert (back.dtype, back.shape) == (torch.float32, (tokens, 512))
    assert torch.equal(rope, round_to(k_pe.float(), torch.bfloat16))


@given(
    exponent=st.integers(-148, 127), spread=st.integers(0, 40), seed=st.integers(0, 9)
)
@settings(max_examples=200, deadline=None)
def test_loss_at_every_magnitude(exponent: int, spread: int, seed: int) -> None:
    kv_c, k_pe = latent(2, seed)
    generator = torch.Generator().manual_seed(seed)
    powers = torch.randint(-spread, 1, kv_c.shape, generator=generator)
    kv_c = torch.ldexp(torch.tanh(kv_c).double(), powers + exponent).float()
    check_loss(kv_c, pack_ds_mla(kv_c, k_pe))


def test_packing_twice_changes_nothing() -> None:
    """Codes and scales of what was unpacked are the same."""
    once = pack_ds_mla(*latent(8))
    assert torch.equal(pack_ds_mla(*unpack_ds_mla_as_floats(once)), once)


def unpack_ds_mla_as_floats(records: Tensor) -> tuple[Tensor, Tensor]:
    kv_c, k_pe = unpack_ds_mla(records)
    return kv_c, k_pe.float()


def test_nan_stays_alone() -> None:
    kv_c, k_pe = latent(1)
    kv_c[0, 7] = float("nan")
    back, _ = unpack_ds_mla(pack_ds_mla(kv_c, k_pe))
    assert back.isnan().nonzero().tolist() == [[0, 7]]
    clean = kv_c.nan_to_num(nan=0.0)
    check_loss(
        clean[:, 8:128].repeat(1, 5)[:, :512],
        pack_ds_mla(clean[:, 8:128].repeat(1, 5)[:, :512], k_pe),
    )


def test_infinity_spoils_its_tile() -> None:
    kv_c, k_pe = latent(1)
    kv_c[0, 130] = float("-inf")
    back, _ = unpack_ds_mla(pack_ds_mla(kv_c, k_pe))
    assert back[0, 128:256].isnan().all()
    assert back[0, :128].isfinite().all()
    assert back[0, 256:].isfinite().all()


def test_strided_parts() -> None:
    """Both parts as slices of one projection, as a model has them."""
    both = torch.cat(latent(5), dim=1)
    kv_c, k_pe = both.tensor_split([512], dim=1)
    packed = pack_ds_mla(kv_c, k_pe)
    assert torch.equal(packed, pack_ds_mla(kv_c.contiguous(), k_pe.contiguous()))
    padded = torch.zeros(5, 700, dtype=torch.uint8)
    padded[:, :656] = packed
    for ours, theirs in zip(
        unpack_ds_mla(padded[:, :656]), unpack_ds_mla(packed), strict=True
    ):
        assert torch.equal(ours, theirs)


def test_wrong_parts() -> None:
    kv_c, k_pe = latent(2)
    with pytest.raises(ValueError, match=r"kv_c must be \[T, 512\]"):
        pack_ds_mla(kv_c[:, :511], k_pe)
    with pytest.raises(ValueError, match=r"k_pe must be \[T, 64\]"):
        pack_ds_mla(kv_c, k_pe[0])
    with pytest.raises(ValueError, match="k_pe must be fp32, fp16 or bf16"):
        pack_ds_mla(kv_c, k_pe.double())
    with pytest.raises(ValueError, match="kv_c has 1 tokens and k_pe has 2"):
        pack_ds_mla(kv_c[:1], k_pe)
    with pytest.raises(ValueError, match=r"records must be uint8 \[T, 656\]"):
        unpack_ds_mla(torch.zeros(2, 584, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"records must be uint8 \[T, 656\]"):
        unpack_ds_mla(torch.zeros(2, 656, dtype=torch.int8))
