"""Containers: which one a process is in, what its runtime calls it, and which devices it may use."""

from limosa.containers.find import Container as Container
from limosa.containers.find import Containers as Containers
