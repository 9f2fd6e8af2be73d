#!/bin/sh
# CRIU runs this at each of its steps, with all descriptors closed; the pipes to whoever started CRIU are open in CRIU
# itself, our parent. Ask there and end with the answer: 0 for yes. When that process is dead, asking fails or reading
# ends at once, and that is a no. When CRIU is dead, our parent is somebody else, whose files these are not.
ask="/proc/$PPID/fd/$LIMOSA_ASK" answer="/proc/$PPID/fd/$LIMOSA_ANSWER"
[ -p "$ask" ] && [ -p "$answer" ] || exit 1
echo "$CRTOOLS_SCRIPT_ACTION" >>"$ask" || exit 1
IFS= read -r said <"$answer" || exit 1
[ "$said" = yes ]
