"""Every mutant, in the order of the layers."""

from __future__ import annotations

from tests.mutants import graphs, kernels, ledger, order, store, values
from tests.mutants.mutant import Mutant

MUTANTS: tuple[Mutant, ...] = (
    *values.MUTANTS, *ledger.MUTANTS, *store.MUTANTS, *order.MUTANTS, *kernels.MUTANTS, *graphs.MUTANTS,
)  # fmt: skip
