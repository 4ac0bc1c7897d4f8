"""From a model file to text: a room for each part; each uses those before it alone, and what stands here uses them all.

    files/          what lies on disk                        running/      weights on devices, recordings, steps
    text/           tokens, templates, sampling              loading/      what a load decides
    architectures/  keys, graphs and cuts, a file each       generation/   sequences that grow together
    cache/          cells, windows, states                   load.py model.py loaded.py plan.py
"""
