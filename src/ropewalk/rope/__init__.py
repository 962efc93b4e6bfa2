"""RoPE mathematics: the frequencies of each method, their form in configs, theory, and the rotary module.

Names are imported on first use: the theory of bases needs numpy but not torch. Its files::

    methods   the methods, one file each, and the table of them
    config    a method read from a config, and written into one
    target    the method that extends a checkpoint to a longer context
    theory    how far a setting reaches, and what a longer context needs
    rotary    the rotary module with exact angles
"""

from typing import TYPE_CHECKING

from ropewalk.lazy import on_first_use

if TYPE_CHECKING:
    from ropewalk.rope.config import (
        ROPE_KEYS as ROPE_KEYS,
        Spelling as Spelling,
        config_entries as config_entries,
        for_all_readers as for_all_readers,
        head_dim as head_dim,
        method_from_config as method_from_config,
        methods_from_config as methods_from_config,
        replace_methods as replace_methods,
    )
    from ropewalk.rope.methods import (
        METHODS as METHODS,
        Cope as Cope,
        Default as Default,
        DynamicNtk as DynamicNtk,
        Linear as Linear,
        Llama3 as Llama3,
        LongRope as LongRope,
        NoRope as NoRope,
        Ntk as Ntk,
        Proportional as Proportional,
        Yarn as Yarn,
    )
    from ropewalk.rope.methods.base import (
        RopeFrequencies as RopeFrequencies,
        RopeMethod as RopeMethod,
        compared_methods as compared_methods,
        register as register,
        trainable_methods as trainable_methods,
        unscaled_inv_freq as unscaled_inv_freq,
    )
    from ropewalk.rope.methods.default import Theta as Theta
    from ropewalk.rope.methods.longrope import (
        has_published_attention as has_published_attention,
        longrope_attention_factor as longrope_attention_factor,
    )
    from ropewalk.rope.rotary import (
        STYLES as STYLES,
        RotaryEmbedding as RotaryEmbedding,
        RotaryRows as RotaryRows,
        Style as Style,
    )
    from ropewalk.rope.target import (
        bound_at as bound_at,
        candidate as candidate,
        candidates as candidates,
        check_candidate as check_candidate,
        method_for_target as method_for_target,
    )
    from ropewalk.rope.theory import (
        critical_dimension as critical_dimension,
        ntk_theta as ntk_theta,
        scaled_theta as scaled_theta,
    )
else:
    __getattr__, __dir__ = on_first_use(__name__)
