"""The modules of the import root `humming`: names only; the code lies in chord/compat."""
