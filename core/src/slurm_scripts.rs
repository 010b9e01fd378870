//! What the texts say that Slurm's own commands hand to a node in place of options: a crontab's script, and the file of
//! `--multi-prog`.

/// How scrontab begins its scripts.
const HEAD: &[u8] = b"#!/bin/sh\n# This job was submitted through scrontab\n";

/// What Slurm takes for a blank: that of C, with the vertical tab, which Rust's leaves out.
fn is_space(byte: &u8) -> bool {
    byte.is_ascii_whitespace() || *byte == 0x0b
}

fn trim_start(line: &[u8]) -> &[u8] {
    &line[line.iter().position(|byte| !is_space(byte)).unwrap_or(line.len())..]
}

/// The option for a container in a script of scrontab's.
pub fn scrontab_option(script: &[u8], slurms_own: bool) -> Option<String> {
    let lines = script.strip_prefix(HEAD)?.split(|byte| *byte == b'\n');
    let options = lines.filter_map(|line| trim_start(line).strip_prefix(b"#SCRON"));
    let words = options.flat_map(|line| line.split(is_space));
    let names = words.map(|word| word.split(|byte| *byte == b'=').next().unwrap_or_default());
    let ours = |name: &&[u8]| match *name {
        b"--container" => !slurms_own,
        name => {
            // Slurm takes any beginning of a name that no other option has.
            let names_a_file =
                [b"--environment".as_slice(), b"--edf"].iter().any(|full| full.starts_with(name));
            let is_setting = name.starts_with(b"--container-") || name.starts_with(b"--no-container-");
            is_setting || names_a_file && name.len() > b"--e".len()
        }
    };
    names.into_iter().find(ours).map(|name| String::from_utf8_lossy(name).into_owned())
}

/// Whether any line is `0-3,5 program argument …` or `* program`. Slurm skips lines that it does not understand.
pub fn is_multi_prog_file(content: &[u8]) -> bool {
    content.split(|byte| *byte == b'\n').map(trim_start).any(|line| {
        let end = line.iter().position(is_space).unwrap_or(0);
        let ranks = &line[..end];
        ranks.iter().any(|byte| byte.is_ascii_digit() || *byte == b'*')
            && ranks.iter().all(|byte| byte.is_ascii_digit() || b",-*:".contains(byte))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_scrontab_was_told_counts() {
        let script = |line: &str| {
            format!(
                "#!/bin/sh\n# This job was submitted through scrontab\n{line}\n# crontab time request was: '@hourly'\nx\n"
            )
        };
        for (line, found) in [
            ("#SCRON --container=/a -n2", Some("--container")),
            ("#SCRON -n2\n#SCRON --container-image /a", Some("--container-image")),
            ("#SCRON --no-container-script", Some("--no-container-script")),
            ("\x0b#SCRON -n1\x0b--container-image=/a", Some("--container-image")),
            ("#SCRON --environment=torch", Some("--environment")),
            ("#SCRON -n1 --env torch", Some("--env")),
            ("#SCRON --edf=torch", Some("--edf")),
            ("#SCRON --contiguous", None),
            ("#SCRON --error=x --exclusive -- -e x --e --", None),
            ("srun --container=/a x", None),
        ] {
            assert_eq!(scrontab_option(script(line).as_bytes(), false).as_deref(), found, "{line}");
        }
        assert_eq!(scrontab_option(script("#SCRON --container=/a").as_bytes(), true), None);
        assert_eq!(scrontab_option(b"#!/bin/sh\n#SCRON --container=/a\n", false), None);
    }

    #[test]
    fn lists_are_known_without_their_last_newline() {
        for list in [
            "0 a",
            "* a b\n",
            "# x\n\n 0-3,5\ta %t\n",
            "0 \\\n a",
            "what is this\n1 a",
            "0-7:2 a",
            "\x0b0 a",
            "0\x0ba",
        ] {
            assert!(is_multi_prog_file(list.as_bytes()), "{list}");
        }
        for other in ["", "0", "5\n", "-c", "--n 3", "- a", "a 0", "echo 0 a", "1.5 x", "10:30:00", "0x1 a"] {
            assert!(!is_multi_prog_file(other.as_bytes()), "{other}");
        }
    }
}
