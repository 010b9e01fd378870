//! Slurm's commands, called by programs in a container whose image has none of them.

use std::time::Duration;

use mizzen_tests::check::assert_out;
use mizzen_tests::images::ImageTree;
use mizzen_tests::{Cluster, Output, Release, Spec, User, without_waiting};

/// One node, so that what is left on it can be seen.
fn start(name: &str) -> Cluster {
    start_release(name, Release::Slurm22_05)
}

fn start_release(name: &str, release: Release) -> Cluster {
    with_image(Cluster::start(Spec { nodes: 1, release, ..Cluster::spec(name) }).unwrap())
}

fn with_image(cluster: Cluster) -> Cluster {
    let image = ImageTree::busybox().unwrap();
    image.file("etc/profile", "export PATH=/usr/bin:/bin\n").unwrap();
    image.program("opt/app/inside", "#!/bin/sh\necho inside in $(pwd)\n").unwrap();
    cluster.share("bb.sqsh", &image.squashfs(&["-comp", "gzip"]).unwrap()).unwrap();
    cluster
}

/// Runs a batch job whose script runs inside, and gives back what it printed.
fn batch(cluster: &Cluster, script: &str) -> Output {
    let script = if script.starts_with("#!") { script.to_owned() } else { format!("#!/bin/sh\n{script}\n") };
    let quoted = script.replace('\'', r"'\''");
    let done = cluster.run(&format!(
        "export PATH=$HOME/bin:$PATH; rm -f out; printf %s '{quoted}' > job.sh; \
         sbatch --quiet --wait --output=out --container=/shared/bb.sqsh job.sh >/dev/null; code=$?; cat out; exit $code"
    ));
    // Both streams of the script are in its output.
    Output { stdout: without_waiting(&done.stdout), ..done }
}

/// No process of Alice's is on the node, soon.
fn assert_nothing_left(cluster: &Cluster) {
    let script = "for i in $(seq 80); do ps -u alice -o args= | grep -vE 'ps -u|defunct' || exit 0; sleep 0.1; done; exit 1";
    let left = cluster.run_on("node1", User::Root, script);
    assert_eq!(left.code, 0, "{}", left.text());
    assert!(cluster.all_idle());
}

#[test]
fn they_end_and_talk_as_on_the_host() {
    let cluster = start("commands");
    let done = batch(
        &cluster,
        r#"
srun hostname; echo "code $?"
srun sh -c 'exit 7' 2>/dev/null; echo "code $?"
srun sh -c 'kill -KILL $$' 2>/dev/null; echo "code $?"
echo hi | srun cat | tr h H
srun sh -c 'echo error >&2' 2>&1 >/dev/null
srun hostname <&-
srun hostname >&- 2>&-; echo "code $?"
srun --no-such-option 2>/dev/null; echo "code $?"
srun sh -c 'echo $#' sh '' 'a b' '*'
"#,
    );
    let expected = "node1\ncode 0\ncode 7\ncode 137\nHi\nerror\nnode1\ncode 0\ncode 255\n3\n";
    assert_out(&done, 0, expected);
    let done = batch(
        &cluster,
        r#"
squeue --noheader --format=%i | grep -cx $SLURM_JOB_ID
scontrol show job $SLURM_JOB_ID | grep -c "JobId=$SLURM_JOB_ID "
sinfo --noheader --format=%N
echo content > file; sbcast file $HOME/copied && cat copied
held=$(sbatch --parsable --hold --wrap true); scancel $held; squeue --noheader --jobs=$held; echo "code $?"
sacct 2>&1; echo "code $?"
"#,
    );
    let accounting = "Slurm accounting storage is disabled\ncode 1\n";
    assert_out(&done, 0, &format!("1\n1\nnode1\ncontent\ncode 0\n{accounting}"));
    // Another job, submitted and waited for from within this one; the controller has room for both.
    let nested = batch(
        &cluster,
        "#SBATCH --ntasks=1\nsbatch --wait --quiet --ntasks=1 --output=nested --wrap 'srun hostname; exit 5'; echo \"code $?\"; cat nested",
    );
    assert_out(&nested, 0, "code 5\nnode1\n");
    assert_nothing_left(&cluster);
}

#[test]
fn every_release_has_them() {
    for release in Release::ALL {
        let cluster = start_release(&format!("commands-{}", release.version()), release);
        let done = batch(
            &cluster,
            "srun hostname; srun sh -c 'exit 7' 2>/dev/null; echo $?; squeue --noheader --format=%i | grep -cx $SLURM_JOB_ID",
        );
        assert_out(&done, 0, "node1\n7\n1\n");
        assert_nothing_left(&cluster);
    }
}

#[test]
fn signals_reach_them() {
    let cluster = start("command-signals");
    // The task catches what srun hands on.
    let caught = batch(
        &cluster,
        r#"
srun sh -c 'trap "echo usr1; exit 3" USR1; echo ready; while :; do sleep 0.1; done' > log 2>/dev/null & shim=$!
while ! grep -q ready log 2>/dev/null; do sleep 0.1; done
kill -USR1 $shim; wait $shim; echo "code $?"; cat log
"#,
    );
    assert_out(&caught, 0, "code 3\nready\nusr1\n");
    // However the shim ends, the step does.
    for (signal, code) in [("TERM", 137), ("KILL", 137)] {
        let ended = batch(
            &cluster,
            &format!(
                "srun sleep 100 2>/dev/null & shim=$!; \
                 until squeue --steps --noheader --format=%i | grep '[.]0$' >/dev/null; do sleep 0.1; done; sleep 0.5; echo 1; \
                 kill -{signal} $shim; wait $shim; echo \"code $?\"; \
                 for i in $(seq 80); do squeue --steps --noheader --format=%i | grep -q '[.]0$' || break; sleep 0.1; done; \
                 squeue --steps --noheader --format=%i | grep -c '[.]0$'"
            ),
        );
        let told = ended.stdout.starts_with("1\n") && ended.stdout.ends_with(&format!("code {code}\n0\n"));
        assert!(told, "{signal}: {}", ended.text());
    }
    // Also where the site's srun is a script, and where the command does not listen.
    let wrapped = r#"#!/bin/bash
/usr/bin/srun "$@"
"#;
    let deaf = r#"#!/bin/bash
trap "" TERM; while :; do sleep 0.2; done
"#;
    cluster.run(&format!(
        "mkdir bin; printf %s '{wrapped}' > bin/srun; printf %s '{deaf}' > bin/sacct; chmod +x bin/*"
    ));
    let ended = batch(
        &cluster,
        "srun sleep 100 2>/dev/null & shim=$!; \
         until squeue --steps --noheader --format=%i | grep '[.]0$' >/dev/null; do sleep 0.1; done; sleep 0.5; kill -KILL $shim; \
         for i in $(seq 80); do squeue --steps --noheader --format=%i | grep -q '[.]0$' || break; sleep 0.1; done; \
         squeue --steps --noheader --format=%i | grep -c '[.]0$'; \
         sacct & sleep 1; kill -KILL $!; sleep 1; ps | grep -c '[s]acct$'; sleep 6; ps | grep -c '[s]acct$'",
    );
    assert_eq!(ended.stdout.replace("Killed\n", ""), "0\n1\n0\n", "{}", ended.text());
    cluster.run("rm -r bin");
    // What the caller ignores is not handed on.
    let ignored = batch(
        &cluster,
        "trap '' HUP; srun sh -c 'sleep 1; echo done' & shim=$!; trap - HUP; sleep 0.5; kill -HUP $shim; wait $shim; echo \"code $?\"",
    );
    assert_out(&ignored, 0, "done\ncode 0\n");
    // A stopped shim has a stopped command: no answer before both go on.
    let stopped = batch(
        &cluster,
        r#"
srun sh -c 'while :; do echo x; sleep 0.1; done' > log 2>/dev/null & shim=$!; sleep 1; kill -TSTP $shim; sleep 0.5
grep -c '^State:.T' /proc/$shim/status
lines=$(wc -l < log); sleep 1; test $lines != 0 && test $lines = $(wc -l < log) && echo stopped
kill -CONT $shim; sleep 1; test $lines = $(wc -l < log) || echo continued
kill -TERM $shim; wait $shim; echo "code $?"
"#,
    );
    assert_out(&stopped, 0, "1\nstopped\ncontinued\ncode 137\n");
    // A cancelled job takes everything with it.
    let cancelled = cluster.run(
        "printf '#!/bin/sh\\nsrun sleep 100 & srun --overlap sleep 100\\n' > job.sh; \
         job=$(sbatch --parsable --output=out --container=/shared/bb.sqsh job.sh); sleep 2; scancel $job",
    );
    assert_eq!(cancelled.code, 0, "{}", cancelled.text());
    assert_nothing_left(&cluster);
}

#[test]
fn a_terminal_works_through_them() {
    let cluster = start("command-terminal");
    let run_typing = |keys: &str, command: &str| {
        // srun --pty types a NUL first, also without mizzen.
        cluster.run(&format!(
            "printf '%s\\n' '{command}' > session; script --quiet --return --command \
             'srun --quiet --pty --container=/shared/bb.sqsh sh session' /dev/null < <(exec 2>/dev/null; {keys} sleep 5 >/dev/null) | tr -d '\\r' | sed 's/\\^@//g'"
        ))
    };
    let run = |command: &str| run_typing("", command);
    let size = run(
        "stty rows 33 cols 77; srun --overlap --pty stty size; srun --overlap --pty test -t 0; echo code $?",
    );
    assert_out(&size, 0, "33 77\ncode 0\n");
    // A window that changes while the command runs.
    let changed = run(
        "stty rows 33 cols 77; (sleep 1; stty rows 40 cols 90 <&1) & srun --overlap --pty sh -c \"sleep 2; stty size\"",
    );
    assert_out(&changed, 0, "40 90\n");
    // The terminal's modes come back.
    let modes =
        run("stty -g > before; srun --overlap --pty true; stty -g > after; cmp before after && echo same");
    assert_out(&modes, 0, "same\n");
    // A key reaches the command once: srun asks for a second Ctrl-C.
    let command = "trap : INT; srun --overlap sleep 100 2>log; grep -oE \"interrupt|sending Ctrl-C\" log";
    let keys = run_typing("sleep 2; printf '\\003'; sleep 0.5; printf '\\003';", command);
    assert_out(&keys, 0, "^C^Cinterrupt\nsending Ctrl-C\n");
    assert_nothing_left(&cluster);
}

#[test]
fn the_images_variables_stay_inside() {
    let cluster = start("command-environment");
    // What would break or mislead the host's srun does not reach it; the user's own variables do.
    let done = batch(
        &cluster,
        r#"
export LD_LIBRARY_PATH=/poison LD_PRELOAD=/poison.so GCONV_PATH=/poison PYTHONPATH=/poison EDITOR=/poison MINE=mine
srun=$(command -v srun); PATH=/poison
"$srun" /bin/true; echo "code $?"
"$srun" --quiet --container=none /usr/bin/env | /bin/grep -E '^(LD_|GCONV|PYTHONPATH|EDITOR|MINE|SLURM_MIZZEN_HOST)'
"#,
    );
    assert_out(&done, 0, "code 0\nMINE=mine\n");
    // Long lists of words and variables.
    let long = batch(
        &cluster,
        r#"
x=$(seq -w 1 25000 | tr '\n' ' '); x=$(echo "$x" | head -c 100000)
export A="$x" B="$x"
srun sh -c 'echo ${#A} ${#B} ${#1}' sh "$x"
"#,
    );
    assert_out(&long, 0, "100000 100000 100000\n");
    // The real command is what PATH says on the host. It is a process like any other there: no descriptors but the
    // three, no signal blocked or ignored, a session of its own, the directory of its caller.
    let real = r#"#!/bin/bash
ls /proc/self/fd | wc -l
# Without signal 32, which Slurm itself has every task ignore.
grep -E "^Sig(Blk|Ign)" /proc/self/status | while read -r key mask; do echo $key $((0x$mask & 0x7fffffff)); done
test $(ps -o sid= -p $$) = $$ && echo own session
echo "$(pwd) $PWD"
test -e /usr/bin/sbatch && echo on the host
test -z "$1" || kill -SEGV $$
"#;
    cluster.run(&format!("mkdir bin sub; printf %s '{real}' > bin/sacct; chmod +x bin/sacct"));
    let process = batch(
        &cluster,
        "trap '' USR1; exec 7</etc/passwd; cd sub; sacct x; echo \"code $?\"; cd /opt/app; sacct | tail -n 2",
    );
    let expected = "4\nSigBlk: 0\nSigIgn: 0\nown session\n\
                    /home/alice/sub /home/alice/sub\non the host\nSegmentation fault\ncode 139\n/ /\non the host\n";
    assert_out(&process, 0, expected);
    // Limits and the mask of files are handed on as by the real srun.
    let limits =
        batch(&cluster, "umask 027; ulimit -S -s 4096; ulimit -S -c 0; srun sh -c 'umask; ulimit -s'");
    assert_out(&limits, 0, "0027\n4096\n");
    assert_nothing_left(&cluster);
}

#[test]
fn the_new_step_has_the_images_variables_again() {
    let cluster = start("command-inside");
    let done = batch(
        &cluster,
        r#"
export LD_LIBRARY_PATH=/opt/lib PYTHONPATH=/opt/python MINE=mine PATH=$PATH:/opt/app
srun sh -c 'echo $LD_LIBRARY_PATH $PYTHONPATH $MINE'
cd /opt/app; srun pwd; srun inside
srun env | grep -c SLURM_MIZZEN_INSIDE
srun --export=NONE /bin/sh -c 'echo "none: $LD_LIBRARY_PATH"; pwd'
srun --container=none sh -c 'echo "host: $LD_LIBRARY_PATH"; cd; pwd'
sbatch --wait --quiet --output=$HOME/nested --wrap 'echo $LD_LIBRARY_PATH; inside' ; cat ~/nested
"#,
    );
    let expected = "/opt/lib /opt/python mine\n/opt/app\ninside in /opt/app\n0\nnone: \n/opt/app\nhost: \n/home/alice\n/opt/lib\ninside in /opt/app\n";
    assert_out(&done, 0, expected);
    let login = batch(&cluster, "#!/bin/sh -l\necho $PATH; srun hostname");
    assert_out(&login, 0, "/usr/bin:/bin\nnode1\n");
}

/// The image has a directory of which the node has another, open for everybody.
fn with_two_scratches(cluster: Cluster) -> Cluster {
    let image = ImageTree::busybox().unwrap();
    image.program("scratch/job.sh", "#!/bin/sh\necho of the image\n").unwrap();
    image.program("scratch/only.sh", "#!/bin/sh\necho only of the image\n").unwrap();
    image.program("scratch/root/bin/sh", "").unwrap();
    image.program("opt/app/tmp/job.sh", "#!/bin/sh\necho of the image\n").unwrap();
    cluster.share("bb.sqsh", &image.squashfs(&["-comp", "gzip"]).unwrap()).unwrap();
    cluster.run_on(
        "node1",
        User::Root,
        "mkdir -m 1777 /scratch; mkdir /project; printf '#!/bin/sh\\necho own\\n' > /project/own.sh",
    );
    let planted = "printf '#!/bin/sh\\necho of bob as $(id -un)\\n' > /scratch/job.sh; cp /scratch/job.sh /scratch/hidden.sh; \
                   cp /scratch/job.sh /tmp/job.sh; chmod 755 /scratch/*.sh /tmp/job.sh; mkdir -p /scratch/root/bin";
    assert_out(&cluster.run_on("node1", User::Bob, planted), 0, "");
    cluster
}

const OTHER: &str = "is another file outside the container, where this command runs";
const OTHER_DIRECTORY: &str =
    "is another directory outside the container, where this command would look for its program";
const HINT: &str = "mizzen: hint: mount its directory at the same place (--container-mounts), or give sbatch the script as its standard input";

#[test]
fn another_users_file_of_the_same_name_is_refused() {
    for release in Release::ALL {
        let spec =
            Spec { nodes: 1, release, ..Cluster::spec(&format!("command-files-{}", release.version())) };
        let cluster = with_two_scratches(Cluster::start(spec).unwrap());
        let done = batch(
            &cluster,
            r#"
submit() { sbatch --quiet --output=$HOME/nested "$@" 2>&1; echo "code $?"; }
submit /scratch/job.sh
exec 2>/dev/null; refused() { "$@" 2>&1 | grep -v hint; }
for words in "-n1 --hold --" "--job-name x -Qv" "-H --exclusive --container-remap-root"; do refused sbatch $words /scratch/job.sh arg; done
cd /scratch; refused sbatch job.sh; refused sbatch ./only.sh; refused sbatch /scratch/hidden.sh; sbatch hidden.sh; echo "code $?"
cd /opt/app; refused sbatch tmp/job.sh
refused srun --bcast=$HOME/copied /scratch/job.sh; refused srun --prolog=/scratch/job.sh true
refused sbcast /scratch/job.sh $HOME/copied; SLURM_PROLOG=/scratch/job.sh refused srun true
refused salloc -n1 /scratch/job.sh
cd; refused sbatch -D /scratch job.sh; refused srun --chdir=/scratch --bcast=$HOME/copied ./job.sh
SLURM_WORKING_DIR=/scratch refused srun --bcast=$HOME/copied ./job.sh
SLURM_STDINMODE=/scratch/job.sh refused srun sh; refused srun --container-image=/scratch/root true
refused sbatch --be now /scratch/job.sh; refused srun --task-prolog=/scratch/only.sh true
for name in SBATCH_CONTAINER MIZZEN_CONTAINER; do env $name=/scratch/root sbatch --wrap true 2>&1 | grep -v hint; done
SLURM_REMOTE_CWD=/scratch refused srun --bcast=$HOME/copied ./job.sh; SLURM_SRUN_MULTI=1 refused srun /scratch/job.sh
SLURM_CONF=/scratch/job.sh squeue --noheader --format=%u
squeue --noheader --format=%i | wc -l; ls ~/copied; echo "code $?"
"#,
        );
        let refused = |command: &str, name: &str, why: &str| format!("mizzen: {command}: {name} {why}\n");
        let planted = |command: &str| refused(command, "/scratch/job.sh", OTHER);
        let inside = "is in the container only, and this command runs outside";
        let unsafe_file = |name: &str| {
            format!(
                "is taken from outside the container, and {name} is not safe from other users: {name} belongs to uid 2002"
            )
        };
        let expected = [
            format!("{}{HINT}\ncode 125\n", planted("sbatch")),
            planted("sbatch").repeat(3),
            refused("sbatch", "job.sh", inside),
            refused("sbatch", "./only.sh", inside),
            refused("sbatch", "/scratch/hidden.sh", &unsafe_file("/scratch/hidden.sh")),
            "code 1\n".to_owned(),
            refused("sbatch", "tmp/job.sh", OTHER),
            ["srun", "srun", "sbcast", "srun"].map(planted).concat(),
            refused("salloc", "/scratch/job.sh", &unsafe_file("/scratch/job.sh")),
            ["sbatch", "srun", "srun"].map(|command| refused(command, "/scratch", OTHER_DIRECTORY)).concat(),
            planted("srun"),
            refused("srun", "/scratch/root", OTHER),
            refused("sbatch", "--be", "may be the beginning of several options"),
            refused("srun", "/scratch/only.sh", inside),
            refused("sbatch", "/scratch/root", OTHER).repeat(2),
            refused("srun", "/scratch", OTHER_DIRECTORY),
            planted("srun"),
            "alice\n".to_owned(),
            "1\ncode 1\n".to_owned(),
        ];
        assert_out(&done, 0, &expected.concat());
        assert_nothing_left(&cluster);
    }
}

/// The node has a /data of bob's where the container has its own: what has no file on one of the sides is no way to it either.
#[test]
fn a_directory_of_another_users_outside_is_not_used() {
    let cluster = start("command-directories");
    let image = ImageTree::busybox().unwrap();
    for program in ["data/prog", "nodes/prog", "data/new/prog"] {
        image.program(program, "#!/bin/sh\necho own\n").unwrap();
    }
    cluster.share("bb.sqsh", &image.squashfs(&["-comp", "gzip"]).unwrap()).unwrap();
    let root = "mkdir -m 755 /data; chown bob /data; mkdir -m 1777 /open; mkdir -m 755 /nodes";
    assert_out(&cluster.run_on("node1", User::Root, root), 0, "");
    let bob = "cd /data; ln -s /home/alice/made out; ln -s /home/alice/victim script; ln -s /home/alice/made /open/out; \
               for job in $(seq 100); do ln -s /home/alice/made slurm-$job.out; done; echo PATH=/data > envf; \
               printf '#!/bin/sh\\necho of bob\\n' > prog; chmod 755 prog; mkdir proj";
    assert_out(&cluster.run_on("node1", User::Bob, bob), 0, "");
    let done = batch(
        &cluster,
        r#"
exec 2>&1; echo precious > victim
printf '#!/bin/sh\npwd\n./prog\n' > job2.sh; chmod 755 job2.sh
refused() { "$@" 2>&1 | grep -v hint; }
refused sbatch --container=none -o /data/out --wrap true; refused sbatch --error=/data/%j.err --wrap true
refused srun --container=none --output /data/new true; refused sbatch -o /data/proj/%x/out --wrap true
refused scontrol write batch_script $SLURM_JOB_ID /data/script; refused sbatch --output=/open/out --wrap true
refused scontrol write batch_script $SLURM_JOB_ID /data/new
for words in "-D /data" --chdir=/data "--chd /data" "-D/data"; do refused sbatch --container=none $words $HOME/job2.sh; done
refused srun --container=none -D /data sh -c ./prog
SLURM_WORKING_DIR=/data refused srun --container=none sh -c ./prog; SLURM_REMOTE_CWD=/data refused srun true
refused salloc -Q -D /data --container=none true; refused scontrol update JobId=$SLURM_JOB_ID WorkDir=/data
refused sbatch --export-file=/data/envf --wrap true; refused srun --container-save=/data/x.sqsh true
# Bob can still make it before the job starts.
for name in /data/new/out /data/none/below/out.%j /open/fresh /open/none/out; do refused sbatch --container=none -o $name --wrap true; done
for name in /data/new /data/none/below /data/envf /data/script /open/none; do refused sbatch --container=none -D $name $HOME/job2.sh; done
refused salloc /data/new/prog; refused srun --container=none --chdir=/data/none true
# Nobody else's, and what is the node's.
show() { sbatch --quiet --wait --ntasks=1 "$@" || echo "code $?"; }
show -o $HOME/nested-%j --wrap true; ls nested-* | wc -l
sbatch --quiet --hold --job-name held -o $HOME/none/out --comment a/b -D $HOME/later --wrap true && scancel --quiet --name held
show -o /dev/null --wrap true; show --container=none -D / -o $HOME/nested --wrap pwd; cat nested
show --container=none -D /nodes -o $HOME/nested --wrap pwd; cat nested; show -o /dev/null --container-mounts=/data/envf:/e --wrap true
srun -Q --overlap -n1 --container=none --input=/dev/null -D $HOME pwd
cat victim; ls made
"#,
    );
    let unsafe_place = |name: &str, place: &str| {
        format!(
            "{name} is taken from outside the container, and {place} is not safe from other users: {place} belongs to uid 2002"
        )
    };
    let open_place = |name: &str| {
        format!("{name} is taken from outside the container, and others can make files in /open")
    };
    let refused = |command: &str, why: &str| format!("mizzen: {command}: {why}\n");
    let outputs = [("sbatch", "/data/out"), ("sbatch", "/data/%j.err"), ("srun", "/data/new")];
    let directory = "/data is another directory outside the container, where this command runs";
    let expected = [
        outputs.map(|(command, name)| refused(command, &unsafe_place(name, "/data"))).concat(),
        refused(
            "sbatch",
            &unsafe_place("/data/proj/%x/out", "/data/proj").replace("/data/proj belongs", "/data belongs"),
        ),
        refused(
            "scontrol",
            &unsafe_place("/data/script", "/data/script").replace("/data/script belongs", "/data belongs"),
        ),
        refused("sbatch", "/open/out is found by another user's link outside: /open/out"),
        refused("scontrol", &unsafe_place("/data/new", "/data")),
        refused("sbatch", directory).repeat(4),
        refused("srun", directory).repeat(3),
        refused("salloc", &format!("/data {OTHER_DIRECTORY}")),
        refused("scontrol", directory),
        refused(
            "sbatch",
            &unsafe_place("/data/envf", "/data/envf").replace("/data/envf belongs", "/data belongs"),
        ),
        refused("srun", &unsafe_place("/data/x.sqsh", "/data")),
        ["/data/new/out", "/data/none/below/out.%j"]
            .map(|name| refused("sbatch", &unsafe_place(name, "/data")))
            .concat(),
        ["/open/fresh", "/open/none/out"].map(|name| refused("sbatch", &open_place(name))).concat(),
        ["/data/new", "/data/none/below", "/data/envf"]
            .map(|name| refused("sbatch", &unsafe_place(name, "/data")))
            .concat(),
        refused("sbatch", "/data/script is found by another user's link outside: /data/script"),
        refused("sbatch", &open_place("/open/none")),
        refused("salloc", &unsafe_place("/data/new/prog", "/data")),
        refused("srun", &unsafe_place("/data/none", "/data")),
        "1\n/\n/nodes\n/home/alice\nprecious\n".to_owned(),
    ];
    let expected = expected.concat() + "ls: made: No such file or directory\n";
    assert_out(&done, 1, &expected);
    assert_nothing_left(&cluster);
}

/// Slurm finds more in a name than is written there, and some directories are written to.
#[test]
fn a_name_is_looked_at_as_slurm_reads_it() {
    let cluster = start("command-names");
    let image = ImageTree::busybox().unwrap();
    for program in ["data/prog", "project/logs/prog", "wd/data/prog"] {
        image.program(program, "#!/bin/sh\necho own\n").unwrap();
    }
    cluster.share("bb.sqsh", &image.squashfs(&["-comp", "gzip"]).unwrap()).unwrap();
    let root =
        "mkdir -m 777 /data; chmod 777 /data; mkdir -p -m 755 /project/logs; chown bob /data /project/logs";
    assert_out(&cluster.run_on("node1", User::Root, root), 0, "");
    let bob = "printf '#!/bin/sh\\necho of bob\\n' > /data/prog; chmod 755 /data/prog";
    assert_out(&cluster.run_on("node1", User::Bob, bob), 0, "");
    let done = batch(
        &cluster,
        r#"
exec 2>&1; refused() { "$@" 2>&1 | grep -v hint; }
printf '#!/bin/sh\necho mine\n' > prog; chmod 755 prog
refused srun --container=none --bcast=/data/ $HOME/prog; refused sbcast prog /data/
SLURM_BCAST=/data/ refused srun --container=none $HOME/prog
refused sbatch --container=none -o '/data\/out%1' --wrap true
SBATCH_OUTPUT='/data\/out%1' refused sbatch --container=none --wrap true
refused sbatch --container=none -D /project -o logs/out --wrap true
refused srun --container=none -o x/../../../data/o true
refused sbatch --container=none -J data -o /%x/out --wrap true
echo "update JobId=$SLURM_JOB_ID StdOut=/data/o" | refused scontrol
cd /wd; for name in SLURM_WORKING_DIR SLURM_REMOTE_CWD; do env $name=data srun --container=none ./prog 2>&1 | grep -v hint; done
cd; srun -Q --overlap --container=none --bcast=$HOME/ ./prog; ls x
"#,
    );
    let refused = |command: &str, why: &str| format!("mizzen: {command}: {why}\n");
    let other =
        |name: &str| format!("{name} is another directory outside the container, where this command runs");
    let taken = |name: &str, why: &str| format!("{name} is taken from outside the container, and {why}");
    let bobs = |place: &str| format!("{place} is not safe from other users: {place} belongs to uid 2002");
    let expected = [
        ["srun", "sbcast", "srun"].map(|command| refused(command, &other("/data/"))).concat(),
        refused("sbatch", &taken("/data/out%1", &bobs("/data"))).repeat(2),
        refused("sbatch", &taken("/project/logs/out", &bobs("/project/logs"))),
        refused(
            "srun",
            "x/../../../data/o leads back (..) from a directory that is not there outside the container",
        ),
        refused("sbatch", &taken("/%x/out", "what Slurm puts in place of % may be another user's directory")),
        refused("scontrol", "its commands on standard input are not looked at"),
        refused("srun", &other("data")).repeat(2),
        "mine\nls: x: No such file or directory\n".to_owned(),
    ];
    assert_out(&done, 1, &expected.concat());
    assert_nothing_left(&cluster);
}

/// A variable that the job has come with is the node's; the same path in another one is not.
#[test]
fn a_path_of_the_job_is_no_excuse_for_another_variable() {
    let cluster = with_two_scratches(start("command-variables"));
    let script = r#"#!/bin/sh
SLURM_STDINMODE=$DATA srun sh 2>&1 | grep -v hint
srun -Q sh -c 'echo $SLURM_PROLOG'
"#;
    cluster.share("job.sh", script.as_bytes()).unwrap();
    let done = cluster.run(
        "DATA=/scratch/job.sh SLURM_PROLOG=/scratch/only.sh sbatch --quiet --wait --output=out --container=/shared/bb.sqsh /shared/job.sh >/dev/null; cat out",
    );
    assert_out(&done, 0, &format!("mizzen: srun: /scratch/job.sh {OTHER}\n/scratch/only.sh\n"));
}

/// Bob serves a directory of his as if it were alice's, or does not answer.
#[test]
fn a_file_that_another_user_serves_outside_is_refused() {
    let cluster = with_two_scratches(start("command-served"));
    assert_out(&cluster.run_on("node1", User::Root, "echo user_allow_other >> /etc/fuse.conf"), 0, "");
    let serve = "mkdir -p ~/evil /scratch/served && cp /scratch/job.sh ~/evil/ && \
                 bindfs -o allow_other,attr_timeout=0,entry_timeout=0 --force-user=2001 --force-group=2001 ~/evil /scratch/served";
    assert_out(&cluster.run_on("node1", User::Bob, serve), 0, "");
    let served =
        "is taken from outside the container, and /scratch/served lies on a file system that uid 2002 serves";
    for stop in ["true", "pkill -STOP -u bob -x bindfs"] {
        assert_out(&cluster.run_on("node1", User::Bob, stop), 0, "");
        let done = batch(
            &cluster,
            "for command in 'salloc -n1' sbatch; do timeout -s KILL 10 $command /scratch/served/job.sh 2>&1 | grep -v hint; done",
        );
        let refused = |command: &str| format!("mizzen: {command}: /scratch/served/job.sh {served}\n");
        assert_out(&done, 0, &["salloc", "sbatch"].map(refused).concat());
    }
    let end = "pkill -KILL -u bob -x bindfs; umount -l /scratch/served";
    assert_out(&cluster.run_on("node1", User::Root, end), 0, "");
}

/// Slurm's own list of options says which have a value, but for a few that it shows wrongly. The first file after the options
/// is what a command is refused for.
#[test]
fn where_the_options_end_is_known_in_every_release() {
    for release in Release::ALL {
        let spec =
            Spec { nodes: 1, release, ..Cluster::spec(&format!("command-options-{}", release.version())) };
        let cluster = with_two_scratches(Cluster::start(spec).unwrap());
        let done = batch(
            &cluster,
            r#"
names() { $1 --help | sed -nE "s/^ {1,6}((-.), )?(--[a-z0-9-]+)($2).*/\2 \3/p" | grep -vE -- '--(container(-id|-writable|-verbose)?|wrap|export|bcast)$'; }
for command in srun sbatch salloc; do
  for flag in $(names $command ' |\[=|$') --container-writable --container-verbose; do
    $command --usage --bcast $flag /opt/app/tmp/job.sh /scratch/job.sh 2>&1 | grep -q /scratch && echo $command $flag
  done
  for option in $(names $command =) --container; do
    $command --usage --bcast $option /no/such/file /scratch/job.sh 2>&1 | grep -qE '/scratch/job.sh is (another|taken)' || echo $command $option
  done
done
names srun '=' | wc -l
"#,
        );
        let count = done.stdout.trim().parse::<u32>();
        assert!(count.is_ok_and(|count| count > 80), "{release}: {}", done.text());
    }
}

#[test]
fn files_that_both_sides_have_are_taken() {
    let cluster = with_two_scratches(start("command-own-files"));
    let done = batch(
        &cluster,
        r#"
exec 2>&1; show() { sbatch --quiet --wait --ntasks=1 --output=$HOME/nested "$@" || echo "code $?"; cat ~/nested; }
printf '#!/bin/sh\necho "mine $@"\n' > mine.sh; chmod +x mine.sh; mkdir -p bin; cp mine.sh bin/in-path.sh; ln -s mine.sh link.sh
show mine.sh /scratch/job.sh; show ~/mine.sh; show ./link.sh a
# In PATH as it is on the host, and one of the node that nobody else can have made.
show in-path.sh; show --container=none /project/own.sh
# The words of the program are the new step's, and so is a command line.
srun --quiet --ntasks=1 --overlap /scratch/job.sh; srun -Q -n 1 --overlap cat /scratch/job.sh | tail -n 1
show --wrap /scratch/job.sh
# What salloc starts is the host's.
salloc --quiet --ntasks=1 /bin/ls -d /usr/bin/sbatch
# The container's script, where the node has another directory.
cd /scratch; show < job.sh; show /dev/stdin < only.sh
srun --quiet --overlap pwd
sbatch --quiet --wait --ntasks=1 --wrap true; echo "code $?"
"#,
    );
    let note =
        "mizzen: note: sbatch: /scratch is another directory outside the container; the job starts in /\n";
    let expected = format!(
        "mine /scratch/job.sh\nmine \nmine a\nmine \nown\nof the image\necho of the image\nof the image\n/usr/bin/sbatch\n\
         {note}of the image\n{note}only of the image\n/scratch\n{note}code 1\n"
    );
    assert_out(&done, 0, &expected);
}

#[test]
fn many_at_once() {
    let cluster = start("command-crowd");
    let done = batch(
        &cluster,
        r#"
for i in $(seq 20); do srun --overlap --ntasks=1 sh -c "echo $i" & done | sort -n | tr '\n' ' '
for i in $(seq 20); do scontrol show job $SLURM_JOB_ID > show.$i & done; wait
cat show.* | grep -c JobName
"#,
    );
    let numbers: String = (1..=20).map(|number| format!("{number} ")).collect();
    assert_out(&done, 0, &format!("{numbers}20\n"));
    assert_ends_clean(&cluster);
}

#[test]
fn cgroups_do_not_matter() {
    let spec = Spec { nodes: 1, cgroup_v1: true, ..Cluster::spec("command-cgroups") };
    let cluster = with_image(Cluster::start(spec).unwrap());
    assert_out(&batch(&cluster, "srun hostname; srun sh -c 'exit 7' 2>/dev/null"), 7, "node1\n");
    assert_ends_clean(&cluster);
}

/// The script's end ends what it left running.
fn assert_ends_clean(cluster: &Cluster) {
    let left = batch(
        cluster,
        "srun sleep 100 >/dev/null 2>&1 & squeue --iterate=1 >/dev/null 2>&1 & sleep 1; echo end",
    );
    assert_out(&left, 0, "end\n");
    assert_nothing_left(cluster);
}

#[test]
fn without_a_helper_the_message_is_clear() {
    let cluster = start("command-helper");
    let killed = batch(
        &cluster,
        r#"
srun sleep 100 2>message & shim=$!; sleep 1
for status in /proc/[0-9]*/status; do grep -q 'Name:.mizzen-slurm' $status && kill -KILL $(echo $status | tr -cd 0-9); done
wait $shim; echo "code $?"; cat message
srun hostname 2>&1; echo "code $?"
unset SLURM_MIZZEN_HOST; srun hostname 2>&1; echo "code $?"
"#,
    );
    let out = &killed.stdout;
    let answers = [
        "helper outside the container was killed",
        "helper outside the container does not answer",
        "SLURM_MIZZEN_HOST is not set",
    ];
    for (answer, code) in answers.iter().zip(["125", "125", "127"]) {
        assert_eq!(out.matches("mizzen: srun: ").count(), 3, "{}", killed.text());
        assert!(
            out.contains(answer) && out.contains(&format!("code {code}\n")),
            "{answer}: {}",
            killed.text()
        );
    }
    assert_nothing_left(&cluster);
    // A command that the node does not have: Debian 12 ships no scrontab.
    let missing = batch(&cluster, "scrontab -l 2>&1; echo \"code $?\"");
    assert!(missing.stdout.starts_with("mizzen: scrontab: no such command on node1\n"), "{}", missing.text());
    assert!(missing.stdout.ends_with("code 127\n"), "{}", missing.text());
}

#[test]
fn nobody_else_reaches_the_helper() {
    let cluster = start("command-users");
    cluster.run(
        "printf '#!/bin/sh\\necho $SLURM_MIZZEN_HOST $$ > name.new; mv name.new name; sleep 100\\n' > job.sh; \
         sbatch --quiet --output=out --container=/shared/bb.sqsh job.sh",
    );
    let started = (0..100).find_map(|_| {
        std::thread::sleep(Duration::from_millis(100));
        Some(cluster.run("cat name 2>/dev/null").stdout.trim().to_owned()).filter(|name| !name.is_empty())
    });
    let started = started.expect("the job starts");
    let (address, script) = started.split_once(' ').unwrap();
    assert_eq!(address, "/.mizzen/helper");
    // There is no address that others could see and connect to, and what they send is closed by nobody.
    let sockets = cluster.run_on("node1", User::Bob, "grep mizzen /proc/net/unix | sed 's/.* //'");
    assert!(!sockets.stdout.contains('@'), "{}", sockets.stdout);
    let inside = format!("/proc/{script}/root{address}");
    for user in [User::Bob, User::Alice] {
        let connect = format!(
            "perl -MSocket -e 'socket(my $s, AF_UNIX, SOCK_STREAM, 0) or die; \
             connect($s, pack_sockaddr_un(\"{inside}\")) or print \"$!\\n\"'"
        );
        let expected = if user == User::Bob { "Permission denied\n" } else { "" };
        assert_out(&cluster.run_on("node1", user, &connect), 0, expected);
    }
    assert_out(&cluster.run_on("node1", User::Alice, &format!("stat -c '%a %U' {inside}")), 0, "600 alice\n");
    // What a program of hers may send that is no shim: the helper lives on.
    let joined = |words: &str| {
        cluster.run(&format!("srun --quiet --jobid=$(squeue --noheader --format=%i) --overlap --container-join=batch sh -c '{words}'"))
    };
    let noise = format!(
        "perl -MSocket -e 'for my $text (\"\", \"O\", \"x\" x 100000) {{ socket(my $s, AF_UNIX, SOCK_STREAM, 0) or die; \
         connect($s, pack_sockaddr_un(\"{inside}\")) or die; $SIG{{PIPE}} = \"IGNORE\"; \
         syswrite($s, $text); shutdown($s, 1); 1 while sysread($s, my $x, 100); }}'"
    );
    assert_out(&cluster.run_on("node1", User::Alice, &noise), 0, "");
    assert_out(
        &joined("SLURM_MIZZEN_HOST=/.mizzen/helper /.mizzen/bin/sinfo --version | cut -d. -f1"),
        0,
        "slurm-wlm 22\n",
    );
    cluster.run("scancel --user=alice");
    assert_nothing_left(&cluster);
}

#[test]
fn they_can_be_switched_off() {
    let cluster = start("command-off");
    cluster.write_everywhere("/etc/mizzen/mizzen.toml", "slurm_commands = false\n").unwrap();
    let off = batch(
        &cluster,
        "command -v srun || echo none; echo host=$SLURM_MIZZEN_HOST; ls -d /.mizzen 2>/dev/null",
    );
    assert_eq!(off.stdout, "none\nhost=\n", "{}", off.text());
}

/// An image can keep them out, and what it has in their place is then not taken for them.
#[test]
fn an_image_cannot_put_others_in_their_place() {
    let cluster = start("command-link");
    let image = ImageTree::busybox().unwrap();
    std::os::unix::fs::symlink("/tmp/x", image.path(".mizzen")).unwrap();
    cluster.share("bb.sqsh", &image.squashfs(&["-comp", "gzip"]).unwrap()).unwrap();
    let planted =
        "mkdir -p /tmp/x/bin; printf '#!/bin/sh\\necho of bob\\n' > /tmp/x/bin/srun; chmod -R 755 /tmp/x";
    assert_out(&cluster.run_on("node1", User::Bob, planted), 0, "");
    let done = batch(&cluster, "srun hostname; echo \"$SLURM_MIZZEN_HOST\"; echo $PATH");
    let expected = "srun: not found\n\n/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin\n";
    assert!(done.stdout.ends_with(expected), "{}", done.text());
    assert!(done.stdout.contains("mizzen: note: node1: /.mizzen is left out: "), "{}", done.text());
}
