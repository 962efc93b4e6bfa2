"""Context parallelism over a ring of ranks: each rank receives the keys and values that its queries see.

Its files::

    plan, exchange   which keys are exchanged, and the exchange with its gradients
    attention        attention over the keys that came
    balance          a row cut so that ranks have equal work
    traffic          bytes of the exchanges
"""

from ropewalk.parallel.ring.attention import prepare as prepare, ring_attend as ring_attend
