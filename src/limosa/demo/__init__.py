"""``limosa demo``: a real job, run undisturbed and disturbed, ends with the same bits.

``train`` is a training and ``compute`` a program on device memory (programs of their own); ``training`` runs one and
reads what it has come to, ``disturb`` decides what this machine can show and does it, ``node`` gives a machine without
a GPU two in software, ``command`` is the verb.
"""
