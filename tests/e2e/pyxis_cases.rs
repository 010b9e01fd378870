//! What the tests of pyxis 0.24 try, one case after the other, on a real cluster: every one of its `tests/*.bats` has a row here
//! that does the same in words of its own, with images that this machine can make. docs/from-pyxis.md gives the sums. A file
//! container_cache.bats is not among them: it belongs to an option that was proposed and that 0.24 does not have.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use mizzen_tests::check::{count, one_node, with_images};
use mizzen_tests::images::{self, ImageTree};
use mizzen_tests::packages::{share_repository, share_rpm_repository};
use mizzen_tests::registry::{Layout, LocalRegistry};
use mizzen_tests::{Cluster, Release, Spec, User};

/// What becomes of a case here.
#[derive(Clone, Copy)]
enum Case {
    /// It holds: the script ends with 0.
    Works(&'static str),
    /// Something else happens here, on purpose: a row of docs/from-pyxis.md says what and why. The script shows it.
    Differs(&'static str),
    /// It holds on a cluster with devices and a driver, in this test of another module.
    WorksIn(&'static str),
    /// Something else happens there.
    DiffersIn(&'static str),
    /// It needs what these tests have not: the image of a public registry.
    NotTried(&'static str),
}

use Case::{Differs, DiffersIn, NotTried, Works, WorksIn};

/// Whatever content an image has, it is imported, named and run in the same way.
const PUBLIC: Case = NotTried("another image of a public registry");

/// File, case, and what becomes of it.
const CASES: &[(&str, &str, Case)] = &[
    (
        "concurrency",
        "containers of five names at once",
        Works(
            "for i in 0 1 2 3 4; do run $D --container-name=many$i sleep 2 & pids=\"$pids $!\"; done; for pid in $pids; do wait $pid; done",
        ),
    ),
    (
        "concurrency",
        "fifty steps with no_exec in five containers that run",
        Works(
            "for i in 0 1 2 3 4; do run $D --container-name=busy$i sh -c 'touch /began; while [ ! -e /done ]; do sleep 0.2; done' & done; \
             for i in 0 1 2 3 4; do until run --container-name=busy$i:exec ls /began > /dev/null 2>&1; do sleep 0.2; done; done; \
             for j in $(seq 50); do run --container-name=busy$((j % 5)):no_exec touch /made$j & pids=\"$pids $!\"; done; for pid in $pids; do wait $pid; done; \
             for i in 0 1 2 3 4; do out 10 --container-name=busy$i:no_exec sh -c 'ls -d /made* | wc -l'; run --container-name=busy$i:no_exec touch /done; done; wait",
        ),
    ),
    ("docker_image", "Ubuntu 12.04", PUBLIC),
    ("docker_image", "Ubuntu 14.04", PUBLIC),
    ("docker_image", "Ubuntu 16.04", PUBLIC),
    ("docker_image", "Ubuntu 18.04", PUBLIC),
    ("docker_image", "Ubuntu 20.04", PUBLIC),
    ("docker_image", "Ubuntu 22.04", PUBLIC),
    (
        "docker_image",
        "Ubuntu 24.04: a short name is Docker Hub's, and tzdata",
        Works(
            "out 'hub one' --container-image=busybox:1.36 sh -c 'echo $FROM $(cat /version)'; \
             out /usr/share/zoneinfo/Etc/UTC --container-remap-root $D bash -c 'mkdir -p /var/cache/debconf && dpkg --force-depends --purge tzdata && eval \"$update\" && \
             DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends tzdata && readlink /etc/localtime'",
        ),
    ),
    ("docker_image", "Ubuntu 26.04", PUBLIC),
    ("docker_image", "CentOS 5", PUBLIC),
    ("docker_image", "CentOS 6", PUBLIC),
    ("docker_image", "CentOS 7", PUBLIC),
    ("docker_image", "CentOS 8", PUBLIC),
    (
        "docker_image",
        "an image of nvcr.io, PyTorch 20.02",
        Works("out 2.5 --container-image=ctl:5000#lab/pytorch:20.02-py3 sh -c 'echo $PYTORCH_VERSION'"),
    ),
    ("docker_image", "an image of nvcr.io, PyTorch 22.04", PUBLIC),
    ("docker_image", "TensorFlow of gcr.io", PUBLIC),
    (
        "docker_image",
        "an image below several names, of gitlab.com",
        Works("out one --container-image=ctl:5000#lab/group/project/app:1.0.0-beta4 cat /version"),
    ),
    ("docker_image", "a device plugin of nvcr.io", PUBLIC),
    (
        "docker_image",
        "what cannot be imported is tried once",
        Differs(
            "said=$(run --ntasks=2 --container-image=thisimagedoesntexist true 2>&1) && exit 1; echo \"$said\"; \
             [ $(grep -c 'mizzen: --container-image: docker://docker.io/library/thisimagedoesntexist:latest: ' <<< \"$said\") = 1 ]; \
             not grep 'failed to import docker image' <<< \"$said\"",
        ),
    ),
    (
        "docker_image",
        "docker:// is written",
        Works("out one --container-image docker://ctl:5000#lab/pytorch:20.02-py3 cat /version"),
    ),
    (
        "docker_image",
        "dockerd://",
        Differs("fails 'docker save .* | mizzen import' --container-image dockerd://mine:1 true"),
    ),
    (
        "docker_image",
        "layers by zstd, and a digest",
        Works("out one --container-image=ctl:5000#lab/zstd@$DIGEST cat /version"),
    ),
    (
        "entrypoint",
        "--container-entrypoint and --no-container-entrypoint",
        Works(
            "run $A --container-entrypoint sh -c '[ -n \"$DOCKER_HOST\" ]'; run $A --no-container-entrypoint sh -c '[ -z \"$DOCKER_HOST\" ]'",
        ),
    ),
    (
        "entrypoint",
        "the entrypoint by hand, in a named container",
        Works(
            "run $A --container-name=site --container-remap-root true; out 'listen 80' --container-name=site cat /etc/site.conf; \
             run --container-name=site --container-remap-root /docker-entrypoint.sh true; out 'listen [::]:80' --container-name=site cat /etc/site.conf",
        ),
    ),
    ("env", "a variable of the host", Works("FOO=bar out bar $D sh -c 'echo $FOO'")),
    ("env", "TERM", Works("TERM=dumb out dumb --no-container-mount-home $D sh -c 'echo $TERM'")),
    (
        "env",
        "HOME elsewhere",
        Works(
            "mkdir -p other; touch other/mark; HOME=$PWD/other run --container-mount-home --container-remap-root $D sh -c 'findmnt /root && ls /root/mark'; \
             HOME=/tmp run --container-mount-home --container-remap-root $D findmnt /root -o SOURCE | tail -n1 | grep -e /tmp -e tmpfs",
        ),
    ),
    (
        "env",
        "LANG that the image does not have",
        Works(
            "LANG=en_US.UTF-8 run --no-container-mount-home $D perl --version 2>&1 | not grep 'Setting locale failed'",
        ),
    ),
    ("env", "NVIDIA_VISIBLE_DEVICES=0", WorksIn("gpu::nvidias_variable_chooses")),
    ("env", "NVIDIA_VISIBLE_DEVICES=all", WorksIn("gpu::nvidias_programs_find_the_driver")),
    (
        "env",
        "NVIDIA_DRIVER_CAPABILITIES, and libcuda in what ldconfig prints",
        DiffersIn("gpu::nvidias_programs_find_the_driver"),
    ),
    (
        "env",
        "--container-env",
        Works(
            "export CUDA_VERSION=12 LD_LIBRARY_PATH=/usr/local/cuda/lib64; show() { out \"$1\" $A --no-container-mount-home \"${@:2}\" \
             sh -c 'echo $CUDA_VERSION $LD_LIBRARY_PATH'; }; show '11.8 /usr/local/nvidia/lib'; show '12 /usr/local/nvidia/lib' --container-env CUDA_VERSION; \
             show '12 /usr/local/cuda/lib64' --container-env CUDA_VERSION,LD_LIBRARY_PATH; show '12 /usr/local/cuda/lib64' --container-env LD_LIBRARY_PATH,CUDA_VERSION",
        ),
    ),
    (
        "env",
        "--container-env with LANG",
        Works(
            "LANG=en_US.UTF-8 run $D --container-env LANG --no-container-mount-home perl --version 2>&1 | grep 'Setting locale failed'",
        ),
    ),
    ("env_vars", "PYXIS_CONTAINER_IMAGE", Works("PYXIS_CONTAINER_IMAGE=/shared/a.sqsh out a cat /image")),
    (
        "env_vars",
        "… below the option",
        Works("PYXIS_CONTAINER_IMAGE=/shared/b.sqsh out a --container-image=/shared/a.sqsh cat /image"),
    ),
    (
        "env_vars",
        "PYXIS_CONTAINER_MOUNTS",
        Works("PYXIS_CONTAINER_MOUNTS=/home:/test-mnt run $D findmnt /test-mnt"),
    ),
    (
        "env_vars",
        "… below the option",
        Works(
            "PYXIS_CONTAINER_MOUNTS=/home:/mnt-env run $D --container-mounts=/tmp:/mnt-cli bash -c 'findmnt /mnt-cli && ! findmnt /mnt-env'",
        ),
    ),
    (
        "env_vars",
        "PYXIS_CONTAINER_WORKDIR",
        Works("PYXIS_CONTAINER_WORKDIR=/usr/local/bin out /usr/local/bin $D pwd"),
    ),
    (
        "env_vars",
        "… below the option",
        Works("PYXIS_CONTAINER_WORKDIR=/usr/local/bin out /tmp $D --container-workdir=/tmp pwd"),
    ),
    (
        "env_vars",
        "PYXIS_CONTAINER_NAME",
        Works(
            "PYXIS_CONTAINER_NAME=named run $D --container-remap-root sh -c 'eval \"$install\"'; \
             run --container-name=named which crew",
        ),
    ),
    (
        "env_vars",
        "… below the option",
        Works(
            "PYXIS_CONTAINER_NAME=named1 run $D --container-name=named2 touch /made; run --container-name=named2 ls /made; \
             fails 'named1' --container-name=named1 ls /made",
        ),
    ),
    (
        "env_vars",
        "PYXIS_CONTAINER_SAVE",
        Works(
            "PYXIS_CONTAINER_SAVE=./saved.sqsh run $A sh -c 'echo pyxis > /test'; out pyxis --container-image=./saved.sqsh cat /test",
        ),
    ),
    (
        "env_vars",
        "… below the option",
        Works(
            "PYXIS_CONTAINER_SAVE=./one.sqsh run $A --container-save=./two.sqsh sh -c 'echo pyxis > /test'; \
             out pyxis --container-image=./two.sqsh cat /test; [ ! -e one.sqsh ]",
        ),
    ),
    (
        "env_vars",
        "PYXIS_CONTAINER_MOUNT_HOME=1",
        Works(
            "PYXIS_CONTAINER_MOUNT_HOME=1 run --container-remap-root $D sh -c 'findmnt /root && ls /root/mark-of-home'",
        ),
    ),
    (
        "env_vars",
        "PYXIS_CONTAINER_MOUNT_HOME=0",
        Works("PYXIS_CONTAINER_MOUNT_HOME=0 run --container-remap-root $D bash -c '! findmnt /root'"),
    ),
    (
        "env_vars",
        "… below the option",
        Works(
            "PYXIS_CONTAINER_MOUNT_HOME=1 run --no-container-mount-home --container-remap-root $D bash -c '! findmnt /root'",
        ),
    ),
    ("env_vars", "PYXIS_CONTAINER_REMAP_ROOT=1", Works("PYXIS_CONTAINER_REMAP_ROOT=1 map 0 2001 1 $D")),
    ("env_vars", "PYXIS_CONTAINER_REMAP_ROOT=0", Works("PYXIS_CONTAINER_REMAP_ROOT=0 map 2001 2001 1 $D")),
    (
        "env_vars",
        "… below the option",
        Works("PYXIS_CONTAINER_REMAP_ROOT=1 map 2001 2001 1 --no-container-remap-root $D"),
    ),
    (
        "env_vars",
        "PYXIS_CONTAINER_ENTRYPOINT=1",
        Works("PYXIS_CONTAINER_ENTRYPOINT=1 run $A sh -c '[ -n \"$DOCKER_HOST\" ]'"),
    ),
    (
        "env_vars",
        "PYXIS_CONTAINER_ENTRYPOINT=0",
        Works("PYXIS_CONTAINER_ENTRYPOINT=0 run $A sh -c '[ -z \"$DOCKER_HOST\" ]'"),
    ),
    (
        "env_vars",
        "… below the option",
        Works("PYXIS_CONTAINER_ENTRYPOINT=0 run --container-entrypoint $A sh -c '[ -n \"$DOCKER_HOST\" ]'"),
    ),
    (
        "env_vars",
        "PYXIS_CONTAINER_ENTRYPOINT_LOG=1",
        Works("PYXIS_CONTAINER_ENTRYPOINT_LOG=1 run --container-entrypoint $A true 2>&1 | grep '== CUDA =='"),
    ),
    (
        "env_vars",
        "PYXIS_CONTAINER_ENTRYPOINT_LOG=0",
        Works(
            "PYXIS_CONTAINER_ENTRYPOINT_LOG=0 run --container-entrypoint $A true 2>&1 | not grep '== CUDA =='",
        ),
    ),
    ("env_vars", "PYXIS_CONTAINER_WRITABLE=1", Works("PYXIS_CONTAINER_WRITABLE=1 run $D touch /newfile")),
    (
        "env_vars",
        "PYXIS_CONTAINER_WRITABLE=0",
        Works("PYXIS_CONTAINER_WRITABLE=0 fails 'Read-only file system' $D touch /newfile"),
    ),
    (
        "env_vars",
        "… below the option",
        Works(
            "PYXIS_CONTAINER_WRITABLE=1 fails 'Read-only file system' --container-readonly $D touch /newfile",
        ),
    ),
    (
        "env_vars",
        "PYXIS_CONTAINER_READONLY=1",
        Works("PYXIS_CONTAINER_READONLY=1 fails 'Read-only file system' $D touch /newfile"),
    ),
    ("env_vars", "PYXIS_CONTAINER_READONLY=0", Works("PYXIS_CONTAINER_READONLY=0 run $D touch /newfile")),
    (
        "env_vars",
        "… below the option",
        Works(
            "PYXIS_CONTAINER_READONLY=0 fails 'Read-only file system' --container-readonly $D touch /newfile",
        ),
    ),
    (
        "env_vars",
        "PYXIS_CONTAINER_ENV",
        Works(
            "export CUDA_VERSION=11.0; PYXIS_CONTAINER_ENV=CUDA_VERSION out 11.0 --no-container-mount-home $A sh -c 'echo $CUDA_VERSION'",
        ),
    ),
    (
        "env_vars",
        "… below the option",
        Works(
            "export CUDA_VERSION=12 LD_LIBRARY_PATH=/usr/local/cuda/lib64; PYXIS_CONTAINER_ENV=CUDA_VERSION out '11.8 /usr/local/cuda/lib64' \
             --no-container-mount-home $A --container-env=LD_LIBRARY_PATH sh -c 'echo $CUDA_VERSION $LD_LIBRARY_PATH'",
        ),
    ),
    (
        "exec",
        "enroot list and enroot exec of a step's container",
        Works(
            "run $D --container-name=exec1 true; run --container-name=exec1 sleep 4 & sleep 1.5; \
             pid=$(enroot_on_node list -f | awk -v A=pyxis_exec1 -v B=pyxis_${SLURM_JOB_ID}_exec1 '($1 == A || $1 == B) { print $2 }'); \
             [ \"$pid\" -gt 1 ]; enroot_on_node exec $pid true; wait",
        ),
    ),
    (
        "exec",
        "what is mounted in a container that runs is there for who enters",
        Works(
            "run $D --container-name=exec2 mkdir /mymnt; run --container-name=exec2 --container-remap-root bash -c 'mount -t tmpfs none /mymnt && sleep 3' & \
             sleep 1.5; run --container-name=exec2 findmnt /mymnt; wait",
        ),
    ),
    (
        "exec",
        "an unnamed container by JOB.STEP",
        Works(
            "step=$(run sh -c 'echo $SLURM_STEP_ID'); run $D sleep 3 & sleep 1.5; run --container-name=$SLURM_JOB_ID.$((step + 1)) true; wait",
        ),
    ),
    (
        "exec",
        "a program in the container has changed its directory",
        Works(
            "run $D --container-name=exec3 bash -c 'cd /var && sleep 3' & sleep 1.5; out / --container-name=exec3 pwd; wait",
        ),
    ),
    (
        "exec",
        "mounts of who enters",
        Works(
            "run $D --container-name=exec4 sleep 3 & sleep 1.5; \
             run --container-name=exec4 --container-mounts /tmp:/mnt/pyxis_test bash -c '[ ! -d /mnt/pyxis_test ]' 2>&1 | grep 'ignoring --container-mounts'; wait",
        ),
    ),
    (
        "exec",
        "exec of a container that has stopped",
        Works("run $D --container-name=exec5 true; fails 'does not run' --container-name=exec5:exec true"),
    ),
    (
        "exec",
        "no_exec of a container that runs",
        Works(
            "run $D --container-name=exec6 sh -c 'readlink /proc/self/ns/mnt > /first; sleep 3' & sleep 1.5; \
             run --container-name=exec6:no_exec sh -c '[ -n \"$(cat /first)\" ] && [ \"$(cat /first)\" != \"$(readlink /proc/self/ns/mnt)\" ]'; wait",
        ),
    ),
    ("invalid_args", "an empty image", Works("fails . --container-image= true")),
    (
        "invalid_args",
        "a very long image",
        Works("fails . --container-image=\"$(head -c 2048 /dev/urandom | base64)\" true"),
    ),
    ("invalid_args", "./ as image", Works("fails . --container-image=./ true")),
    ("invalid_args", "/dev/urandom as image", Works("fails . --container-image=/dev/urandom true")),
    ("invalid_args", "a name that is not there", Works("fails . --container-name=args true")),
    ("invalid_args", "a name with a slash", Works("fails . --container-name=/tmp/foo $D true")),
    ("invalid_args", "empty mounts", Works("fails . --container-mounts= $D findmnt /foo")),
    ("invalid_args", "a mount of nothing", Works("fails . --container-mounts=: $D true")),
    ("invalid_args", "a mount to nothing", Works("fails . --container-mounts=/tmp: $D true")),
    ("invalid_args", "an empty directory", Works("fails . --container-workdir= $D true")),
    (
        "mount_home",
        "with root",
        Works(
            "run --container-mount-home --container-remap-root $D bash -c 'findmnt /root && ls /root/mark-of-home'",
        ),
    ),
    (
        "mount_home",
        "without root",
        Works("run --container-mount-home --no-container-remap-root $D findmnt /home/alice"),
    ),
    (
        "mount_home",
        "no home, with root",
        Works("run --no-container-mount-home --container-remap-root $D bash -c '! findmnt /root'"),
    ),
    (
        "mount_home",
        "no home, without root",
        // The image has no such directory.
        Differs(
            "out tmpfs --no-container-mount-home --no-container-remap-root $D findmnt -n -o FSTYPE /home/alice; \
             run --no-container-mount-home --no-container-remap-root $D bash -c '! ls /home/alice/mark-of-home'",
        ),
    ),
    ("mounts", "a directory", Works("run --container-mounts=/home:/test-mnt $D findmnt /test-mnt")),
    (
        "mounts",
        "a file",
        Works("echo script > file; out script --container-mounts=$PWD/file:/script.bats $D cat /script.bats"),
    ),
    ("mounts", "a device", Works("run --container-mounts=/dev/null:/null $D bash -c '[ -c /null ]'")),
    ("mounts", "the current directory", Works("run --container-mounts=./:/test-mnt $D findmnt /test-mnt")),
    (
        "mounts",
        "several",
        Works(
            "run --container-mounts=./:/test-mnt,/dev/null:/null,/home:/host/home $D sh -c 'findmnt /test-mnt && findmnt /null && findmnt /host/home'",
        ),
    ),
    (
        "mounts",
        "a file that the user cannot read",
        Works(
            "run --container-mounts=/etc/shadow:/shadow $D findmnt /shadow; fails 'Permission denied' --container-mounts=/etc/shadow:/shadow $D cat /shadow",
        ),
    ),
    (
        "mounts",
        "read-only",
        Works("fails 'Read-only file system' --container-mounts=/tmp:/mnt:ro $D touch /mnt/foo"),
    ),
    (
        "mounts",
        "several flags",
        Works(
            "fails 'Read-only file system' --container-mounts=/tmp:/mnt:unbindable+ro $D touch /mnt/foo; \
             run --container-mounts=/tmp:/mnt:unbindable+ro $D findmnt -o PROPAGATION /mnt | tail -n1 | grep unbindable",
        ),
    ),
    (
        "mounts",
        "out of the container",
        Works("fails 'Cross-device link' --container-mounts=/home:../home $D true"),
    ),
    (
        "mounts",
        "one path for both",
        Works("run $D bash -c '! findmnt /var/lib'; run --container-mounts=/var/lib $D findmnt /var/lib"),
    ),
    (
        "mpi",
        "the directory of PMIx",
        Works(
            "run --mpi=pmix --ntasks=4 $D sh -c '[ -n \"$PMIX_SERVER_TMPDIR\" ] && findmnt \"$PMIX_SERVER_TMPDIR\"'",
        ),
    ),
    (
        "mpi",
        "the variables of PMIx",
        Works(
            "run --container-name=mpi $D true; run --mpi=pmix --ntasks=4 --container-name=mpi bash -c \
             '[ \"$PMIX_MCA_psec\" = \"$PMIX_SECURITY_MODE\" ] && [ \"$PMIX_MCA_gds\" = \"$PMIX_GDS_MODULE\" ] && [ -n \"$PMIX_MCA_psec$PMIX_MCA_gds\" ]'; \
             [ \"$(run --mpi=pmix --ntasks=4 --container-name=mpi bash -c 'echo $PMIX_RANK' | sort -n)\" = \"$(seq 0 3)\" ]",
        ),
    ),
    (
        "mpi",
        "the descriptor of PMI2",
        Works(
            "run --mpi=pmi2 --ntasks=4 $D bash -c '[ -n \"$PMI_FD\" ] && readlink /proc/self/fd/$PMI_FD | grep socket'",
        ),
    ),
    (
        "mpi",
        "the variables of PMI2",
        Works("run --mpi=pmi2 --ntasks=4 $D bash -c '[ -n \"$PMI_RANK\" ] && [ $PMI_SIZE = 4 ]'"),
    ),
    ("mpi4py", "Ubuntu 20.04", PUBLIC),
    (
        "mpi4py",
        "Ubuntu 22.04: with PMIx in three directories",
        Works(
            "run $D --container-name=mpi4py true; for tmp in '' /dev/shm /var/tmp; do \
         [ -z \"$tmp\" ] || export SLURM_PMIX_TMPDIR=$tmp; run --mpi=pmix --ntasks=4 --container-name=mpi4py --container-mounts=/shared/allreduce.py:/opt/mpi_test.py:ro python3 /opt/mpi_test.py; done",
        ),
    ),
    ("mpi4py", "Ubuntu 24.04", PUBLIC),
    ("mpi4py", "Ubuntu 26.04", PUBLIC),
    ("mpi4py", "PyTorch 26.02", PUBLIC),
    ("mpi4py", "PyTorch 26.03", PUBLIC),
    (
        "name",
        "unnamed containers go",
        Works(
            "name=$(run $D sh -c 'echo $SLURM_JOB_ID.$SLURM_STEP_ID'); enroot_on_node list | not grep $name",
        ),
    ),
    (
        "name",
        "named containers stay",
        Works(
            "run $D bash -c '! which crew'; \
             run $D --container-name=stay --container-remap-root sh -c 'eval \"$install\"'; \
             run $D --container-name=stay which crew; run --container-name=stay which crew; run $D bash -c '! which crew'; \
             run $D --container-name=stay2 bash -c '! which crew'",
        ),
    ),
    (
        "name",
        "enroot remove of a step's container",
        Works(
            "run $D --container-name=removed touch /made; run --container-name=removed ls /made; \
             enroot_on_node remove -f pyxis_removed || enroot_on_node remove -f pyxis_${SLURM_JOB_ID}_removed; \
             fails 'does not exist' --container-name=removed ls /made; run $D --container-name=removed bash -c '! ls /made'; run --container-name=removed bash -c '! ls /made'",
        ),
    ),
    (
        "path",
        "a program that the host does not have",
        Works("not which only-inside; run $A only-inside --version"),
    ),
    (
        "path",
        "a program in a directory of the image's PATH",
        Works("not which deep-inside; run $A deep-inside version"),
    ),
    (
        "pytorch",
        "variables in an image of nvcr.io",
        Works(
            "run --mpi=none --ntasks=4 $A sh -c '[ -n \"$MASTER_ADDR\" ] && [ -n \"$MASTER_PORT\" ] && [ $LOCAL_RANK = $SLURM_LOCALID ] && [ $RANK = $SLURM_PROCID ]'",
        ),
    ),
    (
        "pytorch",
        "variables in an image of Docker Hub",
        Works(
            "run --container-name=torch $A true; run --mpi=none --ntasks=6 --container-name=torch sh -c '[ $LOCAL_RANK = $SLURM_LOCALID ] && [ $RANK = $SLURM_PROCID ]'; \
             [ \"$(run --mpi=none --ntasks=6 --container-name=torch sh -c 'echo $LOCAL_RANK' | sort -n)\" = \"$(seq 0 5)\" ]",
        ),
    ),
    ("remap_root", "the map with it", Works("map 0 2001 1 --container-remap-root $D")),
    ("remap_root", "the map without it", Works("map 2001 2001 1 --no-container-remap-root $D")),
    (
        "remap_root",
        "the filter with it",
        Works("run --container-remap-root $D grep 'Seccomp:[[:space:]]*2' /proc/self/status"),
    ),
    (
        "remap_root",
        "the filter without it",
        Differs("run --no-container-remap-root $D grep 'Seccomp:[[:space:]]*0' /proc/self/status"),
    ),
    (
        "remap_root",
        "apt-get install file",
        Works("run --container-remap-root $D sh -c 'eval \"$install\" && crew'"),
    ),
    (
        "remap_root",
        "apt-get install emacs-nox: a package with users and devices",
        Works("run --container-remap-root $D sh -c 'eval \"$install\" && getent passwd crew'"),
    ),
    (
        "remap_root",
        "yum install file: dnf, which yum is now",
        Works("run --container-remap-root $R sh -c 'dnf -y install crew && crew'"),
    ),
    (
        "remap_root",
        "yum install emacs-nox: a package with users, devices, modes and capabilities",
        Works(
            "run --container-remap-root $R sh -c 'dnf -y install crew && getent passwd crew && [ -u /usr/bin/crew-setuid ] && getcap /usr/bin/crew-ping | grep cap_net_raw'",
        ),
    ),
    (
        "sbatch",
        "an option of sbatch, and one in the script",
        Works(
            "printf '#!/bin/sh\\ncat /image\\n' | sbatch --quiet --wait -o out1 --container-image=/shared/a.sqsh; [ $(cat out1) = a ]; \
             printf '#!/bin/sh\\n#SBATCH --container-image=/shared/b.sqsh\\ncat /image\\n' | sbatch --quiet --wait -o out2; [ $(cat out2) = b ]",
        ),
    ),
    ("sbatch", "the same with CentOS", PUBLIC),
    (
        "squashfs_image",
        "enroot import, and its file",
        Works(
            "enroot_on_node import -o app.sqsh docker://ctl:5000#lab/pytorch:20.02-py3; out one --container-image=./app.sqsh cat /version",
        ),
    ),
    (
        "squashfs_image",
        "enroot export of a step's container",
        Works(
            "run $D --container-name=exported --container-remap-root sh -c 'eval \"$install\"'; run --container-name=exported sh -c 'echo pyxis > /test'; \
             enroot_on_node export -o modified.sqsh pyxis_exported || enroot_on_node export -o modified.sqsh pyxis_${SLURM_JOB_ID}_exported; \
             run --container-image=./modified.sqsh which crew; out pyxis --container-image=./modified.sqsh cat /test",
        ),
    ),
    ("squashfs_image", "--container-save, absolute", Works("save_again $PWD/saved.sqsh")),
    ("squashfs_image", "--container-save, relative", Works("save_again ./saved.sqsh")),
    ("ssh", "a server for ssh in a container", NotTried("ssh on the nodes and its server in the image")),
    (
        "unshare",
        "a namespace that is none",
        Works("fails 'unknown namespace' --container-unshare=foo $D true"),
    ),
    (
        "unshare",
        "one that is none among others",
        Works("fails 'unknown namespace' --container-unshare=net,foo $D true"),
    ),
    (
        "unshare",
        "all three",
        Works("for kind in net ipc uts; do apart $kind --container-unshare=net,ipc,uts; done"),
    ),
    ("unshare", "PYXIS_CONTAINER_UNSHARE", Works("PYXIS_CONTAINER_UNSHARE=net apart net")),
    ("unshare_ipc", "a namespace of its own", Works("apart ipc --container-unshare=ipc")),
    ("unshare_ipc", "one for all tasks", Works("one_for_all ipc")),
    (
        "unshare_ipc",
        "shared memory of System V",
        Works(
            "[ $(run --container-unshare=ipc $D bash -c 'ipcmk -M 1M >/dev/null && ipcs -m | grep -c ^0x') -ge 1 ]; \
             before=$(run ipcs -m); run --container-unshare=ipc $D bash -c 'ipcmk -M 1M >/dev/null'; [ \"$before\" = \"$(run ipcs -m)\" ]",
        ),
    ),
    (
        "unshare_ipc",
        "/dev, /dev/shm and /dev/mqueue of its own",
        Works(
            "host=$(run stat -c %d /dev /dev/shm); inside=$(run --container-unshare=ipc $D stat -c %d /dev /dev/shm /dev/mqueue); \
             for device in $host; do not grep -qx $device <<< \"$inside\"; done; [ $(wc -l <<< \"$inside\") = 3 ]",
        ),
    ),
    ("unshare_ipc", "the host's without the option", Works("together ipc")),
    ("unshare_ipc", "who enters has the container's", Works("entered ipc")),
    ("unshare_ipc", "a container that runs without it", Works("cannot_enter ipc IPC")),
    ("unshare_net", "a namespace of its own", Works("apart net --container-unshare=net")),
    ("unshare_net", "one for all tasks", Works("one_for_all net")),
    (
        "unshare_net",
        "the loopback",
        Works(
            "fails 'Connection refused' --container-unshare=net $D bash -c 'exec < /dev/tcp/127.0.0.1/65535'",
        ),
    ),
    (
        "unshare_net",
        "nothing else",
        Works(
            "fails 'Network is unreachable' --container-unshare=net $D bash -c 'exec < /dev/tcp/192.0.2.1/53'",
        ),
    ),
    ("unshare_net", "the host's without the option", Works("together net")),
    ("unshare_net", "who enters has the container's", Works("entered net")),
    ("unshare_net", "a container that runs without it", Works("cannot_enter net network")),
    ("unshare_uts", "a namespace of its own", Works("apart uts --container-unshare=uts")),
    ("unshare_uts", "one for all tasks", Works("one_for_all uts")),
    (
        "unshare_uts",
        "another host name",
        Works(
            "out $(run hostname) --container-unshare=uts $D hostname; \
             out container-test --container-unshare=uts --container-remap-root $D bash -c 'hostname container-test && hostname'; not out container-test hostname",
        ),
    ),
    ("unshare_uts", "the host's without the option", Works("together uts")),
    ("unshare_uts", "who enters has the container's", Works("entered uts")),
    ("unshare_uts", "a container that runs without it", Works("cannot_enter uts UTS")),
    ("workdir", "a directory", Works("out /usr/local/bin --container-workdir=/usr/local/bin $D pwd")),
    ("workdir", "out of the container", Works("out / --container-workdir=../ $D pwd")),
    (
        "workdir",
        "one that is not there",
        Works("fails '/pyxis: No such file or directory' --container-workdir=/pyxis $D true"),
    ),
    ("workdir", "the image's", Works("out /workspace $A pwd")),
    (
        "writable",
        "--container-readonly",
        Works("fails 'Read-only file system' --container-readonly $D touch /newfile"),
    ),
    ("writable", "--container-writable", Works("run --container-writable $D touch /newfile")),
];

/// What the rows are written in.
const WORDS: &str = r#"
export SLURM_NTASKS=1 SLURM_NPROCS=1 SLURM_OVERLAP=1 PATH=/opt/names:$PATH
export update="mkdir -p /var/cache/apt/archives/partial && apt-get update"
export install="$update && apt-get install -y --no-install-recommends crew"
D=--container-image=/shared/debian.sqsh A=--container-image=/shared/app.sqsh
R="--container-image=/shared/dnf.sqsh --container-mounts=/shared/rpms:/rpms:ro,/shared/crew.repo:/etc/yum.repos.d/crew.repo:ro"
run() { srun -Q -N1 --oversubscribe "$@"; }
enroot_on_node() { run enroot "$@"; }
not() { ! "$@"; }
# The last line of what a step prints.
out() { local last; last=$(run "${@:2}" | tail -n1); [ "$last" = "$1" ] || { echo "not $1 but: $last" >&2; return 1; }; }
# A step that fails, and says this.
fails() { local said; if said=$(run "${@:2}" 2>&1); then echo "did not fail: $said" >&2; return 1; fi
          grep -q -- "$1" <<< "$said" || { echo "not $1 but: $said" >&2; return 1; }; }
map() { [ "$(run "${@:4}" cat /proc/self/uid_map | xargs)" = "$1 $2 $3" ]; }
namespace() { run "${@:2}" readlink /proc/self/ns/$1; }
apart() { [ "$(namespace $1 $D "${@:2}")" != "$(env -u PYXIS_CONTAINER_UNSHARE srun -Q -N1 readlink /proc/self/ns/$1)" ]; }
together() { [ "$(namespace $1 $D)" = "$(namespace $1)" ]; }
one_for_all() { local all; all=$(namespace $1 $D --ntasks=4 --container-unshare=$1); [ $(wc -l <<< "$all") = 4 ] && [ $(sort -u <<< "$all" | wc -l) = 1 ]; }
entered() { run $D --container-name=apart-$1 --container-unshare=$1 sleep 3 & sleep 1.5; [ "$(namespace $1 --container-name=apart-$1)" != "$(namespace $1)" ]; wait; }
cannot_enter() { run $D --container-name=same-$1 sleep 3 & sleep 1.5
                 fails "not in a separate $2 namespace" --container-name=same-$1 --container-unshare=$1 true; wait; }
# A step that installs a package, in an image that knows how, saves it too.
save_again() { run $A --container-save=$1 sh -c 'echo pyxis > /test'; run --container-image=$1 --container-save=$1 sh -c 'echo slurm > /test2'
               out pyxis --container-image=$1 cat /test; out slurm --container-image=$1 cat /test2
               run $D --container-save=$1 --container-remap-root sh -c 'eval "$install"'; run --container-image=$1 which crew; }
"#;

/// An image as that of a framework: with variables, a directory, an entrypoint with a banner, and programs of its own.
fn app() -> ImageTree {
    let tree = ImageTree::busybox().unwrap();
    let config = r#"{"config": {"Env": ["CUDA_VERSION=11.8", "LD_LIBRARY_PATH=/usr/local/nvidia/lib", "PYTORCH_VERSION=2.5",
        "PATH=/opt/deep/bin:/bin"], "Entrypoint": ["/docker-entrypoint.sh"], "WorkingDir": "/workspace"}}"#;
    tree.file(".mizzen/config.json", config).unwrap();
    tree.file("workspace/file", "").unwrap();
    tree.file("etc/site.conf", "listen 80\n").unwrap();
    let entry = "#!/bin/sh\necho == CUDA ==\n[ ! -w /etc/site.conf ] || echo 'listen [::]:80' > /etc/site.conf\n\
                 export DOCKER_HOST=unix:///run\nexec \"$@\"\n";
    tree.program("docker-entrypoint.sh", entry).unwrap();
    tree.program("bin/only-inside", "#!/bin/sh\necho 1\n").unwrap();
    tree.program("opt/deep/bin/deep-inside", "#!/bin/sh\necho 1\n").unwrap();
    tree
}

/// A registry with what the rows name, which is also a mirror of Docker Hub.
fn registry() -> (LocalRegistry, String) {
    let layout = Layout::new().unwrap();
    let base = ImageTree::busybox().unwrap();
    base.file("version", "one\n").unwrap();
    layout.image("hub", &[&base], &["--config.env=FROM=hub"]).unwrap();
    layout.image("torch", &[&base], &["--config.env=PYTORCH_VERSION=2.5"]).unwrap();
    let registry = LocalRegistry::start().unwrap();
    registry.push(&layout, "hub", "library/busybox:1.36", &[]).unwrap();
    registry.push(&layout, "torch", "lab/pytorch:20.02-py3", &[]).unwrap();
    registry.push(&layout, "hub", "lab/group/project/app:1.0.0-beta4", &[]).unwrap();
    let digest = layout.path().join("digest");
    let options = ["--dest-compress-format=zstd", "--digestfile", digest.to_str().unwrap()];
    registry.push(&layout, "hub", "lab/zstd:1", &options).unwrap();
    let digest = std::fs::read_to_string(digest).unwrap();
    (registry, digest.trim().to_owned())
}

/// So many files are gone through at a time.
const NODES: u32 = 3;

/// A site as those of pyxis's users: its defaults, containers that can be written, a mirror of Debian.
const TOML: &str = r#"
compatible = "pyxis"
writable = true
stage_directory = "/disk"
mounts = ["/shared/repository:/repository:ro", "/shared/sources.list:/etc/apt/sources.list:ro+nofail", "tmpfs:/etc/apt/sources.list.d:nofail"]
[registries."docker.io"]
mirrors = ["http://ctl:5000"]
[registries."ctl:5000"]
plain_http = true
"#;

fn start(release: Release) -> (Cluster, Vec<Box<dyn std::any::Any>>, String) {
    let (registry, digest) = registry();
    let spec = Spec { mizzen_toml: Some(TOML.to_owned()), nodes: NODES, ..one_node(release, "pyxis-cases") };
    let cluster = with_images(spec);
    let served = registry.serve_on(&cluster, 5000, None).unwrap();
    cluster.share("debian.sqsh", &images::mpi().unwrap()).unwrap();
    cluster.share("app.sqsh", &app().squashfs(&["-comp", "zstd"]).unwrap()).unwrap();
    cluster.share("allreduce.py", include_bytes!("mpi/allreduce.py")).unwrap();
    share_repository(&cluster).unwrap();
    cluster.share("sources.list", b"deb [trusted=yes] file:/repository ./\n").unwrap();
    share_rpm_repository(&cluster).unwrap();
    cluster.share("crew.repo", b"[crew]\nname=crew\nbaseurl=file:///rpms\nenabled=1\ngpgcheck=0\n").unwrap();
    cluster.share("words", WORDS.as_bytes()).unwrap();
    for machine in ["ctl", "node1", "node2", "node3"] {
        let made = "mkdir -p /disk && mount -t tmpfs disk /disk && chmod 1777 /disk && mkdir -p /opt/names && \
                    ln -s /usr/bin/mizzen /opt/names/enroot";
        assert_eq!(cluster.run_on(machine, User::Root, made).code, 0);
    }
    (cluster, vec![Box::new(registry), Box::new(served)], digest)
}

/// As pyxis has its tests run: in an allocation, the cases of a file one after the other.
#[test]
fn what_pyxis_tests_holds_here() {
    run_cases_of(Release::Slurm22_05, &|_| true);
}

/// What depends on the release: how Slurm hands options, variables and streams over, and what it has for MPI.
#[test]
fn what_depends_on_the_release_holds_with_a_newer_one() {
    let essentials = [
        "entrypoint",
        "env",
        "env_vars",
        "exec",
        "mount_home",
        "mpi",
        "mpi4py",
        "name",
        "pytorch",
        "remap_root",
        "sbatch",
    ];
    run_cases_of(Release::Slurm24_11, &|file| count(0, 1) == 1 || essentials.contains(&file));
}

fn run_cases_of(release: Release, of_interest: &dyn Fn(&str) -> bool) {
    let (cluster, _registries, digest) = start(release);
    cluster.run("touch ~/mark-of-home; mkdir -p cases");
    let mut files: BTreeMap<&str, Vec<(usize, &str)>> = BTreeMap::new();
    for (number, (file, case, what)) in CASES.iter().enumerate() {
        let (Works(row) | Differs(row)) = what else { continue };
        if !of_interest(file) {
            continue;
        }
        cluster.share(&format!("case{number}"), format!("source /shared/words\n{row}\n").as_bytes()).unwrap();
        files.entry(file).or_default().push((number, case));
    }
    // A save of a whole Debian takes its time.
    let at_once = |file: &str| if file == "squashfs_image" { 1 } else { 6 };
    let chunks: Vec<&[(usize, &str)]> =
        files.iter().flat_map(|(file, cases)| cases.chunks(at_once(file))).collect();
    let (next, failed) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..NODES {
            scope.spawn(|| {
                while let Some(cases) = chunks.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let found = run_cases(&cluster, cases, &digest);
                    failed.lock().unwrap().extend(found);
                }
            });
        }
    });
    let failed = failed.into_inner().unwrap();
    assert!(failed.is_empty(), "{}:\n{}", failed.len(), failed.join("\n"));
    assert!(cluster.all_idle(), "{:?}", cluster.node_states());
}

/// Those that did not end with 0, and what they said.
fn run_cases(cluster: &Cluster, cases: &[(usize, &str)], digest: &str) -> Vec<String> {
    let numbers: Vec<String> = cases.iter().map(|(number, _)| number.to_string()).collect();
    let is_sbatch = CASES[cases[0].0].0 == "sbatch";
    let each = format!(
        "export DIGEST={digest}; for i in {}; do mkdir cases/$i; \
         (cd cases/$i; timeout 50 bash -eo pipefail /shared/case$i > said 2>&1; echo $i $?); done",
        numbers.join(" ")
    );
    let ran = match is_sbatch {
        true => cluster.run(&each),
        false => cluster.run(&format!("salloc -Q -N1 -n8 bash -c '{each}'")),
    };
    let held = |number: usize| ran.stdout.lines().any(|line| line == format!("{number} 0"));
    let failed = cases.iter().filter(|(number, _)| !held(*number));
    failed
        .map(|(number, case)| {
            let said = cluster.run(&format!("cat cases/{number}/said"));
            format!("{}: {case}: {}{}", CASES[*number].0, said.text(), ran.stderr)
        })
        .collect()
}

#[test]
fn the_documents_have_the_sums() {
    let count = |of: fn(&Case) -> bool| CASES.iter().filter(|(_, _, case)| of(case)).count();
    let works = count(|case| matches!(case, Works(_) | WorksIn(_)));
    let differs = count(|case| matches!(case, Differs(_) | DiffersIn(_)));
    for (_, case, what) in CASES {
        let (WorksIn(test) | DiffersIn(test)) = what else { continue };
        let (module, function) = test.split_once("::").unwrap();
        let source = mizzen_tests::repository().join(format!("tests/e2e/{module}.rs"));
        let source = std::fs::read_to_string(source).unwrap();
        assert!(source.contains(&format!("fn {function}(")), "{case}: {test}");
    }
    let not_tried = count(|case| matches!(case, NotTried(_)));
    let page = std::fs::read_to_string(mizzen_tests::repository().join("docs/from-pyxis.md")).unwrap();
    let page = page.split_whitespace().collect::<Vec<_>>().join(" ");
    let mut reasons = BTreeMap::new();
    for (_, _, case) in CASES {
        if let NotTried(reason) = case {
            *reasons.entry(reason).or_insert(0) += 1;
        }
    }
    let reasons: Vec<String> = reasons
        .iter()
        .map(|(reason, count)| format!("{count} {} {reason}", if *count == 1 { "needs" } else { "need" }))
        .collect();
    let sums = format!(
        "{} cases: {works} hold here, {differs} differ on purpose, {not_tried} are not tried ({})",
        CASES.len(),
        reasons.join(", ")
    );
    assert!(page.contains(&sums), "docs/from-pyxis.md must say: {sums}");
}
