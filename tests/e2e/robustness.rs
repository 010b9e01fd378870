//! Steps in containers under bad conditions: many tasks, kills at any time, bugs.

use mizzen_tests::check::{
    Emptiness, assert_failed, assert_out, cancel_at_any_time, count, run_in_time, start_with_busybox,
    with_busybox,
};
use mizzen_tests::images::ImageTree;
use mizzen_tests::{Cluster, Output, Release, Spec, User, target_dir};

const PLUGIN: &str = "/usr/lib/mizzen/spank_mizzen.so";
const LAUNCHER: &str = "/usr/lib/mizzen/mizzen-enter";
const IMAGE: &str = "--container-image=/shared/bb.sqsh";

#[test]
fn any_number_of_tasks_ends_in_any_order() {
    let cluster = start_with_busybox(Spec { cpus: 256, ..Cluster::spec("many-tasks") });
    let empty = Emptiness::of(&cluster, &["node1", "node2"]);
    let host = cluster.run("readlink /proc/self/ns/mnt").stdout;
    // The first task ends first, every eighth at once, the others within 300 ms and after they have used the image.
    let program = "echo $SLURMD_NODENAME $(readlink /proc/self/ns/mnt); [ $((SLURM_LOCALID % 8)) = 0 ] && exit 0; \
                   usleep $((RANDOM % 300 * 1000)); cat /etc/os-release >/dev/null && [ $(ulimit -n) = 256 ]";
    for round in 0..count(2, 50) {
        for (nodes, tasks) in [(1, 1), (1, 2), (1, 64), (1, 256), (2, 64)] {
            let srun = cluster.run(&format!(
                "ulimit -n 256; srun --quiet -N{nodes} --ntasks-per-node={} {IMAGE} sh -c '{program}' | sort | uniq -c",
                tasks / nodes
            ));
            assert_eq!((srun.code, srun.stderr.as_str()), (0, ""), "{round}: {tasks}: {}", srun.text());
            let namespaces: Vec<&str> = srun.stdout.lines().map(str::trim).collect();
            assert_eq!(namespaces.len(), nodes, "one container on each node: {}", srun.text());
            for line in namespaces {
                assert!(line.starts_with(&format!("{} node", tasks / nodes)), "{}", srun.text());
                assert!(!line.ends_with(host.trim()), "{}", srun.text());
            }
        }
        empty.assert_again(&cluster, "many tasks");
    }
}

#[test]
fn steps_of_a_job_have_containers_of_their_own() {
    let cluster = start_with_busybox(Cluster::spec("steps"));
    let empty = Emptiness::of(&cluster, &["node1", "node2"]);
    let tree = ImageTree::busybox().unwrap();
    for name in ["a", "b"] {
        tree.file("etc/which", &format!("{name}\n")).unwrap();
        cluster.share(&format!("{name}.sqsh"), &tree.squashfs(&[]).unwrap()).unwrap();
    }
    let step = "srun --overlap -n4 --container-image=/shared/$image.sqsh sh -c \"usleep 200000; cat /etc/which; readlink /proc/self/ns/mnt\"";
    for _ in 0..count(2, 20) {
        let job = cluster.run(&format!(
            "salloc --quiet -N2 -n8 bash -c 'for i in 1 2; do for image in a b; do {step} > out.$i.$image & done; done; wait'"
        ));
        assert_out(&job, 0, "");
        for image in ["a", "b"] {
            let names = cluster.run(&format!("cat out.?.{image} | grep -v mnt | sort | uniq -c | xargs"));
            assert_out(&names, 0, &format!("8 {image}\n"));
        }
        // The steps shared neither a container nor, across nodes, anything else.
        let containers = cluster.run("cat out.?.? | grep -c mnt; cat out.?.? | grep mnt | sort -u | wc -l; for f in out.?.?; do grep mnt $f | sort -u | wc -l; done | sort -n | uniq -c | xargs; rm out.?.?");
        let lines: Vec<&str> = containers.stdout.lines().collect();
        assert_eq!(lines[0], "16", "{}", containers.text());
        let distinct: u32 = lines[1].parse().unwrap();
        let per_step: u32 = lines[2]
            .split(' ')
            .map(|n| n.parse::<u32>().unwrap())
            .collect::<Vec<_>>()
            .chunks(2)
            .map(|pair| pair[0] * pair[1])
            .sum();
        assert_eq!(distinct, per_step, "{}", containers.text());
    }
    empty.assert_again(&cluster, "steps at once");
}

/// The kernel counts the descriptors that lie in sockets, of all processes of a user together, against the limit on
/// open files of the one that sends another.
#[test]
fn many_steps_at_once_do_not_use_up_the_descriptors() {
    let cluster = with_busybox("many-steps");
    let empty = Emptiness::of(&cluster, &["node1"]);
    for (limit, tasks, steps) in [("-n 64", 1, 40), ("-Sn 64", 2, 25)] {
        let job = cluster.run(&format!(
            "ulimit {limit}; salloc --quiet -n2 bash -c 'for i in $(seq {steps}); do \
             srun --quiet --overlap -n{tasks} {IMAGE} sh -c \"ulimit -Sn; until [ -e ~/go ]; do sleep 0.3; done\" & done; \
             until [ $(pgrep -xc mizzen-fuse) -ge {steps} ]; do sleep 0.2; done; touch ~/go; wait; rm ~/go' | uniq -c"
        ));
        assert_out(&job, 0, &format!("{:7} 64\n", tasks * steps));
        assert_eq!(job.stderr, "");
    }
    empty.assert_again(&cluster, "many steps");
}

#[test]
fn a_cancelled_job_leaves_nothing() {
    for release in Release::ALL {
        let name = format!("cancels-{}", release.version());
        let cluster = start_with_busybox(Spec { release, nodes: 1, ..Cluster::spec(&name) });
        let most = release == Release::Slurm22_05;
        let runs = if most { count(12, 200) } else { count(4, 40) };
        cancel_at_any_time(&cluster, &Emptiness::of(&cluster, &["node1"]), runs);
    }
}

#[test]
fn a_killed_process_does_not_hang_its_step() {
    let cluster = with_busybox("killed-parts");
    let empty = Emptiness::of(&cluster, &["node1"]);
    let prolog = |text: &str| {
        cluster.share("prolog", format!("#!/bin/bash\n{text}\n").as_bytes()).unwrap();
        cluster.run_as_root("chmod 755 /shared/prolog");
        format!("srun -n8 --task-prolog=/shared/prolog {IMAGE}")
    };
    // The first task, before it becomes the launcher, while the others wait for it; all of them tell it once.
    let srun = prolog("[ $SLURM_LOCALID != 0 ] || { sleep 0.5; kill -KILL $PPID; }");
    let first = run_in_time(&cluster, &format!("{srun} touch ~/marker"));
    assert_failed(
        &first,
        137,
        "mizzen: node1: the first task on this node ended before it had made the container",
    );
    empty.assert_again(&cluster, "the first task killed");
    // The same while it builds: at any of its system calls.
    let wrapper = "case $SLURM_LOCALID in\n\
                   0) exec strace -D -o /dev/null -e inject=all:signal=KILL:when=$WHEN /usr/lib/mizzen/real/mizzen-enter \"$@\";;\n\
                   *) exec /usr/lib/mizzen/real/mizzen-enter \"$@\";;\nesac";
    cluster.share("wrapper", format!("#!/bin/bash\n{wrapper}\n").as_bytes()).unwrap();
    let wrap = format!(
        "cd /usr/lib/mizzen; mkdir real; ln -s /usr/bin/mizzen real/mizzen-enter; cp -P {LAUNCHER} /root; install -m 755 /shared/wrapper {LAUNCHER}.new; mv {LAUNCHER}.new {LAUNCHER}"
    );
    assert_out(&cluster.run_on("node1", User::Root, &wrap), 0, "");
    let (mut failed, mut started) = (0, 0);
    for call in (1..).step_by(if count(0, 1) == 1 { 1 } else { 31 }) {
        let killed = run_in_time(
            &cluster,
            &format!("WHEN={call} srun -n4 {IMAGE} sh -c 'echo $SLURM_PROCID' | sort | xargs"),
        );
        let told = "mizzen: node1: the first task on this node ended before it had made the container";
        match (killed.stdout.as_str(), killed.stderr.matches("mizzen: ").count()) {
            ("\n", 2) => assert_failed(&Output { code: 125, ..killed }, 125, told),
            ("1 2 3\n", 0) => started += 1,
            ("0 1 2 3\n", 0) => break, // it makes fewer calls
            _ => panic!("killed at its call {call}: {}", killed.text()),
        }
        failed += 1;
        empty.assert_again(&cluster, &format!("the builder killed at its call {call}"));
    }
    assert!(failed > 3 && failed < 1000, "{failed}, {started}");
    empty.assert_again(&cluster, "the builder killed");
    cluster.run_on(
        "node1",
        User::Root,
        &format!("mv /root/mizzen-enter {LAUNCHER}; rm -r /usr/lib/mizzen/real"),
    );
    // slurmstepd: its tasks go on, by Slurm's ways; nothing of ours outlives them.
    let stepd = std::thread::scope(|scope| {
        let srun =
            scope.spawn(|| cluster.run(&format!("timeout 8 srun -n4 {IMAGE} sleep 3; scancel -u alice")));
        let kill = "for i in $(seq 100); do pgrep -x -u alice sleep >/dev/null && exec kill -KILL $(pgrep slurmstepd); sleep 0.05; done; exit 1";
        assert_out(&cluster.run_as_root(kill), 0, "");
        srun.join().unwrap()
    });
    assert!(!stepd.stderr.contains("mizzen"), "{}", stepd.text());
    empty.assert_again(&cluster, "slurmstepd killed");
    assert_eq!(cluster.run("ls ~/marker").stdout, "", "something ran");
}

mod a_bug_in_any_hook_does_not_run_jobs_on_the_host {
    use super::*;

    #[test]
    fn slurm_20_11() {
        inject_everywhere(Release::Slurm20_11);
    }

    #[test]
    fn slurm_22_05() {
        inject_everywhere(Release::Slurm22_05);
    }

    #[test]
    fn slurm_24_11() {
        inject_everywhere(Release::Slurm24_11);
    }

    #[test]
    fn slurm_26_05() {
        inject_everywhere(Release::Slurm26_05);
    }

    fn inject_everywhere(release: Release) {
        let mut spec =
            Spec { release, nodes: 1, ..Cluster::spec(&format!("injected-{}", release.version())) };
        spec.layers.insert(0, target_dir().join("stage-inject"));
        let cluster = start_with_busybox(spec);
        // Leaves a mark where it does not see the image.
        let program = "grep -q Busybox /etc/os-release || touch ~/marker";
        assert_out(
            &cluster.run(&format!("printf '#!/bin/sh\n{program}\n' > program; chmod 755 program")),
            0,
            "",
        );
        let empty = Emptiness::of(&cluster, &["node1"]);
        for requirement in ["required", "optional"] {
            for (place, single, several) in [
                ("init", 125, 125),
                ("option", 125, 125),
                ("init_post_opt", 125, 125),
                ("task_init_privileged", 125, 125),
                // The first task is not hurt; the others do not know it, and must not go on.
                ("task_post_fork", 0, 125),
                ("task_init", 125, 125),
                ("task_exit", 0, 0),
                ("exit", 0, 0),
            ] {
                cluster
                    .set_plugstack(&[&format!("{requirement} {PLUGIN} inject-panic=node:{place}")])
                    .unwrap();
                let mut commands = vec![
                    (format!("srun -n3 {IMAGE} /home/alice/program"), several),
                    (format!("salloc --quiet {IMAGE} srun /home/alice/program"), single),
                ];
                if requirement == "required" || count(0, 1) == 1 {
                    // (--wait looks only every other second.)
                    let job = format!(
                        "job=$(sbatch --parsable --output=/shared/out {IMAGE} /home/alice/program); \
                         while [ -n \"$(squeue -h)\" ]; do sleep 0.05; done; cat /shared/out >&2; \
                         exit $(scontrol show job $job | sed -n 's/.* ExitCode=\\([0-9]*\\):.*/\\1/p')"
                    );
                    commands.push((job, single));
                }
                for (command, code) in commands {
                    let hit = run_in_time(&cluster, &command);
                    let what = format!("{release} {requirement} {place} {command}: {}", hit.text());
                    assert_eq!(hit.code, code, "{what}");
                    let told = hit.stderr.matches("mizzen: ").count();
                    assert_eq!(told > 0, code != 0, "{what}");
                    assert!(hit.stderr.matches("mizzen: hint").count() <= 1, "{what}");
                    assert_eq!(cluster.run("ls ~/marker").stdout, "", "on the host: {what}");
                }
            }
        }
        empty.assert_again(&cluster, "panics");
    }
}
