//! The small example, as its README tells users to run it: a training on two nodes, by srun and as a batch job. (Those with the
//! large frameworks are run by `make demo-tensorflow` and `make demo-pytorch`: their images take ten minutes to make.)

use mizzen_tests::examples::{Example, check_training};
use mizzen_tests::{Cluster, Output, Release, Spec};

#[test]
fn slurm_22_05() {
    the_loss_falls(Release::Slurm22_05);
}

#[test]
fn slurm_24_11() {
    the_loss_falls(Release::Slurm24_11);
}

fn the_loss_falls(release: Release) {
    let name = format!("examples-{}", release.version());
    let cluster = Cluster::start(Spec { release, ..Cluster::spec(&name) }).unwrap();
    Example::NUMPY.install(&cluster).unwrap();
    assert_trained(&cluster.run("srun --quiet -N2 -n4 --container=numpy.sqsh --mpi=pmix python3 train.py"));
    assert_trained(
        &cluster
            .run("sbatch --quiet --wait --output=train.out train.sbatch; code=$?; cat train.out; exit $code"),
    );
}

/// Four ranks found each other, and learned something.
#[track_caller]
fn assert_trained(output: &Output) {
    assert_eq!(output.code, 0, "{}", output.text());
    check_training(&output.stdout).unwrap();
    let mut lines = output.stdout.lines();
    assert_eq!(lines.next(), Some("4 ranks on node1, node2"), "{}", output.text());
    let losses: Vec<f64> = lines
        .filter_map(|line| {
            let (loss, speed) = line.split_once(": loss ")?.1.split_once(", ")?;
            speed.ends_with(" images/s").then_some(loss)?.parse().ok()
        })
        .collect();
    assert_eq!(losses.len(), 5, "{}", output.text());
    // Guessing gives ln(10) = 2.3.
    assert!(losses[0] > 1.5 && losses[4] < 0.5, "{}", output.text());
}

/// What no test here runs has at least the shape of what is run.
#[test]
fn every_batch_script_names_its_own_image() {
    for example in Example::ALL {
        let script = example.text("train.sbatch").unwrap();
        let line = format!("\n#SBATCH --container={}\n", example.image_name());
        assert!(script.contains(&line), "{}: {script}", example.name);
        let readme = example.text("README.md").unwrap();
        for named in ["train.sbatch\n", &format!("build-image.sh {} tree", example.name)] {
            assert!(readme.contains(named), "{}: {named}", example.name);
        }
    }
}
