"""The RoPE scaling methods, one module each, and :data:`METHODS`, the table in which each method registers itself.

To add a method, write a module here and add one line below; :class:`~ropewalk.rope.methods.base.RopeMethod` lists what
methods define.
"""
# The order of the lines is that of the table, and of every list of methods that people read.

from ropewalk.rope.methods.base import METHODS as METHODS
from ropewalk.rope.methods.default import Default as Default
from ropewalk.rope.methods.linear import Linear as Linear
from ropewalk.rope.methods.ntk import DynamicNtk as DynamicNtk, Ntk as Ntk
from ropewalk.rope.methods.yarn import Yarn as Yarn
from ropewalk.rope.methods.llama3 import Llama3 as Llama3
from ropewalk.rope.methods.longrope import LongRope as LongRope
from ropewalk.rope.methods.cope import Cope as Cope
from ropewalk.rope.methods.no_rope import NoRope as NoRope
from ropewalk.rope.methods.proportional import Proportional as Proportional
