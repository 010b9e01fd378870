//! The directories in `examples/`: their images, made by their own script, and their files as users have them.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::images::packed_once;
use crate::release::{debian_mirror, make_once};
use crate::{Cluster, run_tool, target_dir};

/// One of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Example {
    /// Its directory's name, which is the image's too.
    pub name: &'static str,
}

impl Example {
    /// A small network, in numpy and mpi4py.
    pub const NUMPY: Example = Example { name: "numpy" };
    /// ResNet-50 with TensorFlow and Horovod.
    pub const TENSORFLOW: Example = Example { name: "tensorflow" };
    /// ResNet-50 with torch.
    pub const PYTORCH: Example = Example { name: "pytorch" };
    /// All of them.
    pub const ALL: [Example; 3] = [Example::NUMPY, Example::TENSORFLOW, Example::PYTORCH];

    /// Finds one by its name.
    pub fn parse(name: &str) -> Result<Example> {
        let found = Example::ALL.into_iter().find(|example| example.name == name);
        found.with_context(|| format!("no such example: {name} (there are numpy, tensorflow, pytorch)"))
    }

    /// The tree of its image; made now if it is not there yet, or if its recipe has changed.
    pub fn tree(self) -> Result<PathBuf> {
        let script = directory().join("build-image.sh");
        let mut recipe = fs::read_to_string(&script)?;
        recipe.push_str(&self.text("debian.txt")?);
        for optional in ["requirements.txt", "setup.sh"] {
            recipe.push_str(&self.text(optional).unwrap_or_default());
        }
        make_once(&format!("example-{}", self.name), &recipe, |root| {
            eprintln!("making the image of examples/{} ...", self.name);
            let mut build = Command::new(&script);
            build.arg(self.name).arg(root).args(debian_mirror()?);
            let pip = target_dir().join("tools/bin/pip");
            // Debian's python3 may have none; `make stage` has made this one.
            if pip.exists() {
                build.env("PIP", pip);
            }
            run_tool(&mut build).map(drop)
        })
    }

    /// Its image, as zstd squashfs.
    pub fn image(self) -> Result<Vec<u8>> {
        packed_once(&self.tree()?)
    }

    /// One of its files.
    pub fn text(self, file: &str) -> Result<String> {
        let path = directory().join(self.name).join(file);
        fs::read_to_string(&path).with_context(|| path.display().to_string())
    }

    /// Gives Alice what a user of the example has in their home: the image, the program and the batch script.
    pub fn install(self, cluster: &Cluster) -> Result<()> {
        cluster.share(&self.image_name(), &self.image()?)?;
        for file in ["train.py", "train.sbatch"] {
            cluster.share(file, self.text(file)?.as_bytes())?;
        }
        let copied = cluster.run(&format!("cp /shared/train.* . && ln -s /shared/{} .", self.image_name()));
        ensure!(copied.code == 0, "{}", copied.text());
        Ok(())
    }

    /// The name of its image's file.
    pub fn image_name(self) -> String {
        format!("{}.sqsh", self.name)
    }
}

/// Whether what a training has printed shows four ranks on two nodes that learned something.
pub fn check_training(printed: &str) -> Result<()> {
    ensure!(
        printed.lines().any(|line| line == "4 ranks on node1, node2"),
        "the training was not on two nodes:\n{printed}"
    );
    let losses: Vec<f64> = printed
        .lines()
        .filter_map(|line| line.split_once(": loss ")?.1.split(',').next()?.parse().ok())
        .collect();
    let has_fallen = matches!(losses.as_slice(), [first, .., last] if last < first);
    ensure!(has_fallen, "the loss has not fallen: {losses:?}");
    ensure!(printed.contains(" images/s"), "no images per second:\n{printed}");
    Ok(())
}

fn directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_training_that_learns_nothing_is_seen() {
        let printed = |nodes: &str, last: &str| {
            format!("4 ranks on {nodes}\nepoch 1: loss 1.7, 70 images/s\nepoch 2: loss {last}, 70 images/s\n")
        };
        assert!(check_training(&printed("node1, node2", "0.5")).is_ok());
        for (bad, why) in [
            (printed("node1", "0.5"), "not on two nodes"),
            (printed("node1, node2", "1.7"), "the loss has not fallen: [1.7, 1.7]"),
            (printed("node1, node2", "nan"), "the loss has not fallen"),
            ("4 ranks on node1, node2\nstep 5: loss 1.7\n".to_owned(), "the loss has not fallen: [1.7]"),
            (
                "4 ranks on node1, node2\nstep 5: loss 1.7\nstep 6: loss 1\n".to_owned(),
                "no images per second",
            ),
        ] {
            let error = check_training(&bad).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
    }
}
