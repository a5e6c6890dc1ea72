""" From text to token files; see prepare.py. """
