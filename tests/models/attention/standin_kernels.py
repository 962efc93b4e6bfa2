"""Stand-ins for the kernels of fla, mamba-ssm and causal-conv1d: their signatures, computed in torch, run by run.

The signatures are those of the packages' sources of August 2026. transformers' own wrapper is put around each, so that
it drops and passes the same arguments as for the installed package.
"""

import inspect
import sys
from itertools import pairwise
from types import ModuleType

import torch
from torch.nn import functional as F
from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback

PACKAGES = {
    "causal_conv1d_fn": ("causal_conv1d", "causal_conv1d_fn"),
    "torch_chunk_gated_delta_rule": ("fla", "chunk_gated_delta_rule"),
    "chunk_kimi_delta_attention": ("fla", "chunk_kda"),
    "mamba2_chunk_scan": ("mamba_ssm", "mamba_chunk_scan_combined"),
    "mamba2_split_conv1d_scan_combined": ("mamba_ssm", "mamba_split_conv1d_scan_combined"),
}
"""Package and name of the kernel that replaces each function of transformers."""


def install(monkeypatch, mixer_class, functions=PACKAGES, **replaced):
    """Replace functions that a mixer calls, as transformers does where their packages are installed.

    Args:
        monkeypatch: pytest's.
        mixer_class: the class of the mixer.
        functions: names of the functions to replace, of those that its module has.
        **replaced: other stand-ins for some kernels, by name of the kernel.

    Returns:
        A list to which each call appends the kernel's name and those of its bound arguments that are not None.
    """
    module, calls = sys.modules[mixer_class.__module__], []
    for name in functions:
        if not hasattr(module, name):
            continue
        own = getattr(module, name).__wrapped__
        package, kernel = PACKAGES[name]
        stand_in = replaced.get(kernel) or _recorded(kernel, _KERNELS[kernel](own, module), calls)
        fake = ModuleType(package)
        setattr(fake, kernel, stand_in)
        with monkeypatch.context() as imported:
            imported.setitem(sys.modules, package, fake)
            wrapped = use_kernel_func_from_hub_with_fallback(kernel, package)(own)
        monkeypatch.setattr(module, name, wrapped)
    return calls


def _recorded(name, kernel, calls):
    signature = inspect.signature(kernel)

    def record(*args, **kwargs):
        given = signature.bind(*args, **kwargs).arguments
        calls.append((name, {key: value for key, value in given.items() if value is not None}))
        return kernel(*args, **kwargs)

    record.__signature__ = signature
    return record


def _by_run(bounds, compute, *tensors):
    """``compute`` on each run of tensors ``[1, length, ...]``, concatenated along their length."""
    return torch.cat([compute(*(tensor[:, a:b] for tensor in tensors)) for a, b in pairwise(bounds)], 1)


def _bounds(seq_idx, length):
    if seq_idx is None:
        return [0, length]
    # What the kernels demand of it.
    assert seq_idx.dtype == torch.int32
    assert seq_idx.shape == (1, length)
    assert seq_idx.is_contiguous()
    starts = torch.nonzero(seq_idx[0].diff()).flatten() + 1
    return [0, *starts.tolist(), length]


def _convolution(own, module):
    def causal_conv1d_fn(
        x,
        weight,
        bias=None,
        seq_idx=None,
        initial_states=None,
        return_final_states=False,
        final_states_out=None,
        activation=None,
    ):
        assert initial_states is None
        assert not return_final_states
        if seq_idx is None:
            return own(x, weight, bias, activation)
        # "seq_idx is only supported for channel last layout"
        assert x.stride(1) == 1

        def convolve(part):
            return own(part.transpose(1, 2), weight, bias, activation).transpose(1, 2)

        return _by_run(_bounds(seq_idx, x.shape[2]), convolve, x.transpose(1, 2)).transpose(1, 2)

    return causal_conv1d_fn


def _delta_rule(own, module):
    def chunk_gated_delta_rule(
        q,
        k,
        v,
        g,
        beta,
        scale=None,
        initial_state=None,
        output_final_state=False,
        use_qk_l2norm_in_kernel=False,
        use_beta_sigmoid_in_kernel=False,
        allow_neg_eigval=False,
        state_v_first=False,
        cu_seqlens=None,
        cu_seqlens_cpu=None,
        chunk_indices=None,
        cp_context=None,
        **kwargs,
    ):
        assert scale is None
        bounds = [0, q.shape[1]]
        if cu_seqlens is not None:
            assert q.shape[0] == 1
            assert cu_seqlens.dtype == torch.int64
            bounds = cu_seqlens.tolist()
        if initial_state is not None:
            # A state for each run, or for each row.
            assert len(initial_state) == (len(bounds) - 1 if cu_seqlens is not None else len(q))
            assert initial_state.dtype == torch.float32
            assert initial_state.is_contiguous()
        before = iter([None] * len(bounds) if initial_state is None else initial_state.split(len(q)))
        states = []

        def recur(q, k, v, g, beta):
            output, state = own(
                q,
                k,
                v,
                g=g,
                beta=beta,
                initial_state=next(before),
                output_final_state=output_final_state,
                use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            )
            states.append(state)
            return output

        output = _by_run(bounds, recur, q, k, v, g, beta)
        return output, torch.cat(states) if output_final_state else None

    return chunk_gated_delta_rule


def _chunk_scan(own, module):
    def mamba_chunk_scan_combined(
        x,
        dt,
        A,
        B,
        C,
        chunk_size,
        D=None,
        z=None,
        dt_bias=None,
        initial_states=None,
        seq_idx=None,
        cu_seqlens=None,
        dt_softplus=False,
        dt_limit=(0.0, float("inf")),
        return_final_states=False,
        return_varlen_states=False,
        state_dtype=None,
    ):
        assert z is None
        options = {"dt_softplus": dt_softplus, "dt_limit": dt_limit}
        if initial_states is not None or return_final_states:
            # The real one takes a state for each row, whatever runs the row has.
            assert seq_idx is None
            options |= {"initial_states": initial_states, "return_final_states": return_final_states}
            return own(x, dt, A, B, C, chunk_size, D, dt_bias, **options)

        def scan(x, dt, B, C):
            return own(x, dt, A, B, C, chunk_size, D, dt_bias, **options)

        return _by_run(_bounds(seq_idx, x.shape[1]), scan, x, dt, B, C)

    return mamba_chunk_scan_combined


def _split_scan(own, module):
    scan = _chunk_scan(module.mamba2_chunk_scan.__wrapped__, module)
    convolve = _convolution(module.causal_conv1d_fn.__wrapped__, module)

    def mamba_split_conv1d_scan_combined(
        zxbcdt,
        conv1d_weight,
        conv1d_bias,
        dt_bias,
        A,
        D,
        chunk_size,
        initial_states=None,
        seq_idx=None,
        dt_limit=(0.0, float("inf")),
        return_final_states=False,
        activation="silu",
        rmsnorm_weight=None,
        rmsnorm_eps=1e-6,
        outproj_weight=None,
        outproj_bias=None,
        headdim=None,
        ngroups=1,
        norm_before_gate=True,
        state_dtype=None,
    ):
        assert not norm_before_gate
        heads = D.shape[0]
        dim = heads * headdim
        states = (conv1d_weight.shape[0] - dim) // 2
        z, xbc, dt = zxbcdt.split([dim, dim + 2 * states, heads], -1)
        xbc = convolve(xbc.transpose(1, 2), conv1d_weight, conv1d_bias, seq_idx, activation=activation)
        x, b, c = xbc.transpose(1, 2).split([dim, states, states], -1)
        b, c = (each.unflatten(2, (ngroups, -1)) for each in (b, c))
        out = scan(
            x.unflatten(2, (heads, headdim)),
            dt,
            A,
            b,
            c,
            chunk_size,
            D,
            dt_bias=dt_bias,
            seq_idx=seq_idx,
            dt_softplus=True,
            dt_limit=dt_limit,
        )
        gated = out.flatten(2) * F.silu(z.to(out.dtype))
        if rmsnorm_weight is not None:
            groups = gated.unflatten(2, (ngroups, -1))
            gated = (groups * (groups.square().mean(-1, True) + rmsnorm_eps).rsqrt()).flatten(2)
            gated = gated * rmsnorm_weight
        return F.linear(gated.to(outproj_weight.dtype), outproj_weight, outproj_bias)

    return mamba_split_conv1d_scan_combined


_KERNELS = {
    "causal_conv1d_fn": _convolution,
    "chunk_gated_delta_rule": _delta_rule,
    "chunk_kda": _delta_rule,
    "mamba_chunk_scan_combined": _chunk_scan,
    "mamba_split_conv1d_scan_combined": _split_scan,
}


def in_torch(function, module):
    """A kernel with its own signature, in torch.

    Args:
        function: the function of transformers that it replaces, of :data:`PACKAGES`.
        module: a module of transformers with that function.
    """
    return _KERNELS[PACKAGES[function][1]](getattr(module, function).__wrapped__, module)
