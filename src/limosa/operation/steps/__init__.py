"""The steps that verbs are made of, by what they work on.

:mod:`driver`: the driver's calls; :mod:`carry`: device memory that goes another way, beside them; :mod:`dump`: a job
into an image; :mod:`from_image`: an image into a job. Which verb has which, in which order: ``limosa.operation.verbs``.
"""
