"""Names of humming-kernels on Chord's kernels, for engines that call them: W4A16 MoE only.

    dtypes.py     number types by their names
    config.py     enumerations, and the description of one projection
    schema.py     what a checkpoint says, and refusals of all but W4A16
    forward.py    the calls at run time
    humming/      the modules of the import root `humming`: names only, no code

The modules of humming/ may be loaded twice, as `humming.config` and by their place in Chord;
because they only pass names on, both hold the same classes.
"""
