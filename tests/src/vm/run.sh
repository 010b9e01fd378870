# What a virtual machine does: it starts Slurm's daemons on itself, makes every check as its user, and writes the results to the last
# disk. Run by: pid 1 of the machine.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8
finish() {
    tar -cf /dev/vdd -C /run/results .
    sync
    echo "@@ finished"
    echo o > /proc/sysrq-trigger
    while :; do sleep 1; done
}
trap finish EXIT
fail() {
    echo "@@ failed: $*"
    exit 1
}
dmesg -n 1
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -p /run/results /run/munge /dev/pts /dev/shm /dev/mqueue /var/log/slurm /var/spool/slurmd /var/spool/slurmctld
chmod 755 /run/munge
mount -t tmpfs -o mode=1777 tmpfs /tmp
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mount -t devpts -o newinstance,ptmxmode=0666,mode=620,gid=5 devpts /dev/pts
mount -t mqueue mqueue /dev/mqueue
[ -e /dev/fd ] || ln -s /proc/self/fd /dev/fd
[ -e /dev/ptmx ] || ln -s pts/ptmx /dev/ptmx
# For AppArmor's own programs, where the kernel has it.
mount -t securityfs securityfs /sys/kernel/security
# A file system that mizzen.toml counts as a network file system.
mkdir -p /network
mount -t ramfs -o mode=755 ramfs /network
cp /images/start.sqsh /network || fail "no image for /network"
chmod 666 /dev/fuse || fail "there is no /dev/fuse"
hostname node1
ip link set lo up
ip address add 10.77.0.1/16 dev lo
echo "@@ kernel $(uname -r) $(uname -m)"
# Where the packages were only unpacked there is no key yet, and programs lack the names that were chosen for them.
[ -e /etc/ld.so.cache ] || ldconfig
for program in slurmctld slurmd slurmstepd; do
    [ -e /usr/sbin/$program ] || ln -s $program-wlm /usr/sbin/$program
done
[ -e /etc/munge/munge.key ] || head -c 128 /dev/urandom > /etc/munge/munge.key
mkdir -p /var/log/munge /var/lib/munge
chmod 700 /etc/munge && chmod 400 /etc/munge/munge.key
chown -R munge:munge /run/munge /etc/munge /var/log/munge /var/lib/munge
setpriv --reuid=munge --regid=munge --clear-groups /usr/sbin/munged --num-threads=2 || fail "munged: $(cat /var/log/munge/munged.log)"
slurmctld -i || fail "slurmctld"
slurmd || fail "slurmd"
for i in $(seq 600); do
    [ "$(sinfo --noheader --format=%T 2>/dev/null)" = idle ] && break
    sleep 0.2
done
[ "$(sinfo --noheader --format=%T)" = idle ] || fail "the node is $(sinfo --noheader --format=%T): $(tail -n 5 /var/log/slurm/*.log)"
echo "@@ Slurm runs"
for check in /vm/checks/*; do
    result=/run/results/${check##*/}
    mkdir "$result"
    user=$(cat "$check/user")
    home=$(getent passwd "$user" | cut -d: -f6)
    begin=$(date +%s%N)
    (
        cd "$home"
        exec env HOME="$home" USER="$user" LOGNAME="$user" timeout --signal=KILL 180 \
            setpriv --reuid="$user" --regid="$user" --init-groups -- bash "$check/script" < /dev/null > "$result/stdout" 2> "$result/stderr"
    )
    echo $? > "$result/code"
    echo $((($(date +%s%N) - begin) / 1000000)) > "$result/milliseconds"
    echo "@@ done ${check##*/}"
done
cp /var/log/slurm/*.log /run/results
dmesg > /run/results/dmesg.log
