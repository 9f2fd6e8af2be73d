"""Hostile input at each border: what a stranger's process, file or command line says is answered, never believed."""
