"""The command line: one file per verb, each imported only when it is called.

``main`` knows the verbs by name, ``options`` holds what they share, ``output`` prints results and errors,
``signals`` turns Ctrl-C into a cancelled operation. A verb's module has a function ``command``; its docstring is
the verb's help. Nothing outside this package prints or exits.
"""
