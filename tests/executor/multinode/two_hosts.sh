# Two network namespaces with one cable between them, as two hosts: sh two_hosts.sh FIRST SECOND
# runs both commands (in a namespace each) and ends with the first one's exit code.
set -e
unshare --net sleep 600 & first=$!
unshare --net sleep 600 & second=$!
trap 'kill $first $second' EXIT
for host in $first $second; do
    until [ "$(readlink /proc/$host/ns/net)" != "$(readlink /proc/$$/ns/net)" ]; do sleep 0.02; done
done
ip link add cable0 type veth peer name cable1
ip link set cable0 netns $first
ip link set cable1 netns $second
for host in "$first 0 10.77.0.1" "$second 1 10.77.0.2"; do
    set -- "$1" "$2" $host
    nsenter --target "$3" --net ip link set lo up
    nsenter --target "$3" --net ip addr add "$5/24" dev "cable$4"
    nsenter --target "$3" --net ip link set "cable$4" up
done
nsenter --target $second --net sh -c "$2" &
other=$!
code=0
nsenter --target $first --net sh -c "$1" || code=$?
wait $other || echo "second host: exit code $?" >&2
exit $code
