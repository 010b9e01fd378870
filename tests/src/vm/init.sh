#!/bin/busybox sh
# The first program of a virtual machine: loads the modules that the root file system needs, puts that together and enters it.
# Run by: pid 1, in the initial ramdisk.
/bin/busybox mkdir -p /proc /sys /dev /lower /product /disk /root
/bin/busybox --install -s /bin
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
fail() {
    echo "@@ failed: $*"
    poweroff -f
}
for module in $(cat /modules/order); do
    insmod "/modules/$module" || echo "@@ note: no module $module"
done
for i in $(seq 100); do
    [ -b /dev/vdd ] && break
    sleep 0.1
done
mount -t squashfs -o ro /dev/vda /lower || fail "the root file system"
mount -t squashfs -o ro /dev/vdb /product || fail "the product"
mount -t ext4 /dev/vdc /disk || fail "the disk"
mkdir -p /disk/upper /disk/work /disk/local
mount -t overlay -o lowerdir=/product:/lower,upperdir=/disk/upper,workdir=/disk/work overlay /root || fail "the root"
mkdir -p /root/local /root/proc /root/sys /root/dev /root/tmp /root/run
chmod 1777 /disk/local
mount --bind /disk/local /root/local
for place in proc sys dev; do
    mount --move /$place /root/$place
done
exec switch_root /root /bin/bash /vm/run
