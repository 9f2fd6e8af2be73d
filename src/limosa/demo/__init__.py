"""``limosa demo``: a real training, run undisturbed and disturbed, ends with the same bits.

``train`` is the training (a program of its own), ``training`` runs it and reads its losses, ``disturb`` decides what
this machine can show and does it, ``command`` is the verb.
"""
