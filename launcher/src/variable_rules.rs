//! Which variables belong to the host and which to the image. This table is the policy; docs/users.md says the same in prose.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

/// What happens to a variable of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// The host's value holds, whatever the image says: it describes the user or the job.
    Host,
    /// The host's value means nothing inside: it names files or locales of the host, or code for its shell.
    Drop,
}

/// The first matching line decides; a name that ends in `*` stands for all that begin so. For a variable that
/// matches no line the image's value holds, else the host's.
const RULES: [(&str, Rule); 40] = [
    ("HOME", Rule::Host),
    ("USER", Rule::Host),
    ("LOGNAME", Rule::Host),
    ("TERM", Rule::Host),
    ("DISPLAY", Rule::Host),
    ("TZ", Rule::Host),
    ("SLURM_*", Rule::Host),
    ("SLURMD_*", Rule::Host),
    ("SRUN_*", Rule::Host),
    ("PMI_*", Rule::Host),
    ("PMI2_*", Rule::Host),
    // Where the node's PMIx is installed.
    ("PMIX_INSTALL_PREFIX", Rule::Drop),
    ("PMIX_*", Rule::Host),
    ("OMPI_*", Rule::Host),
    ("MPI_LOCAL*", Rule::Host),
    ("PALS_*", Rule::Host),
    ("CUDA_VISIBLE_DEVICES", Rule::Host),
    ("ROCR_VISIBLE_DEVICES", Rule::Host),
    ("ZE_AFFINITY_MASK", Rule::Host),
    ("GPU_DEVICE_ORDINAL", Rule::Host),
    ("MIZZEN_*", Rule::Host),
    ("PATH", Rule::Drop),
    ("OPAL_*", Rule::Drop),
    ("LD_*", Rule::Drop),
    ("GCONV_PATH", Rule::Drop),
    ("LOCPATH", Rule::Drop),
    ("LANG", Rule::Drop),
    ("LANGUAGE", Rule::Drop),
    ("LC_ALL", Rule::Drop),
    ("MANPATH", Rule::Drop),
    ("BASH_ENV", Rule::Drop),
    ("ENV", Rule::Drop),
    ("BASH_FUNC_*", Rule::Drop),
    ("PROMPT_COMMAND", Rule::Drop),
    ("PYTHONHOME", Rule::Drop),
    ("EDF_PATH", Rule::Drop),
    ("XDG_DATA_DIRS", Rule::Drop),
    ("XDG_RUNTIME_DIR", Rule::Drop),
    ("PWD", Rule::Drop),
    ("OLDPWD", Rule::Drop),
];

/// Whether the variable names files of the side it is set on, host or container, and means nothing on the other.
pub fn belongs_to_one_side(name: &OsStr) -> bool {
    rule(name) == Some(Rule::Drop)
}

/// What happens to this one; None: the image's value holds, else the host's.
pub fn rule(name: &OsStr) -> Option<Rule> {
    RULES.iter().find(|(pattern, _)| matches(pattern, name)).map(|(_, rule)| *rule)
}

/// Whether this is the name, or one of the names, of which a table speaks.
pub fn matches(pattern: &str, name: &OsStr) -> bool {
    match pattern.strip_suffix('*') {
        Some(prefix) => name.as_bytes().starts_with(prefix.as_bytes()),
        None => name == pattern,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_users_guide_shows_every_rule() {
        let guide = include_str!("../../docs/users.md");
        for (pattern, rule) in RULES {
            let row = match rule {
                Rule::Host => "the host's: they describe you",
                Rule::Drop => "never the host's",
            };
            let line = guide.lines().find(|line| line.contains(row)).unwrap();
            assert!(
                line.contains(&format!("`{pattern}`")),
                "docs/users.md lacks {pattern} in the row \"{row}\""
            );
        }
    }
}
