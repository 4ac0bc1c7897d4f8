"""How tensors are divided over devices.

In come shapes, types and proportions, out come split states and cut points, all of it data that nothing here carries out:

    state.py     a split state: an axis with its cuts, mirrored, or partial
    cut.py       `--tensor-split` as exact fractions, and where they cut an axis
    rules.py     what a policy is made of      families.py  the policies: one table per architecture
    policy.py    the cut plan of a model       pieces.py    taking pieces out of whole tensors and putting them back
"""
