# Becomes CRIU, once the caller has written down who we are. Arguments: signals, a count, so many files to write our pid
# into (control groups), then the command. Signals set to be ignored here stay so in CRIU and its action script; what
# CRIU restores gets the dispositions it had.
# shellcheck disable=SC2086 - several words
trap '' $1
shift
IFS= read -r go <"/proc/self/fd/$LIMOSA_ANSWER" || exit 125
[ "$go" = yes ] || exit 125
count=$1
shift
while [ "$count" -gt 0 ]; do
    echo $$ >"$1" || exit 126
    shift
    count=$((count - 1))
done
# The guard of names comes before the C library (native/criu/guard.c). Not for this shell.
[ -z "$LIMOSA_GUARD" ] || export LD_PRELOAD="$LIMOSA_PRELOAD"
exec "$@"
