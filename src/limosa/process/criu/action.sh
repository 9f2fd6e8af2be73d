#!/bin/sh
# CRIU runs this at each of its steps, with all descriptors closed; the pipes to whoever started CRIU are open in CRIU
# itself, our parent. Ask there and end with the answer: 0 for yes. When that process is dead, asking fails or reading
# ends at once, and that is a no.
echo "$CRTOOLS_SCRIPT_ACTION" >"/proc/$PPID/fd/$LIMOSA_ASK" || exit 1
IFS= read -r answer <"/proc/$PPID/fd/$LIMOSA_ANSWER" || exit 1
[ "$answer" = yes ]
