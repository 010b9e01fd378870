//! Which words of a Slurm command may name files that the command reads. Runs inside, in the shim.
//!
//! What follows the program of a step means nothing to srun, so where its options end has to be known: `srun -l cat
//! /etc/passwd` reads no file. For that it is enough to know which options have no word after them. One that is missing here makes
//! the next word the value of an option, and values are looked at too; where that looks like an option, it could be one, and the
//! command is refused. A beginning of such a name could be that of another option, which has a word after it (`--be` is salloc's
//! `--bell` and sbatch's `--begin`): it is refused.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;

use mizzen_core::Failure;
use mizzen_core::failure::quote;
use mizzen_core::settings::Argument;
use mizzen_core::slurm_options::{self, OptionSpec};

/// The options of srun, sbatch and salloc, in any release, that leave the next word alone.
pub const FLAGS: &str = "async bcast bell compress consolidate-segments contiguous debugger-test disable-status exact \
    exclusive external external-launcher get-user-env help hold ignore-pbs immediate interactive kill-command kill-on-bad-exit label \
    multi-prog nice no-allocate no-bell no-kill no-requeue no-shell oom-kill-step overcommit overlap oversubscribe \
    parsable preserve-env propagate pty quiet quit-on-interrupt reboot requeue resv-ports send-libs share spread-job \
    spread-segments stepmgr test-only unbuffered usage use-min-nodes verbose version wait-for-children whole x11";

/// Their letters.
pub const LETTERS: &str = "EHIKOQVXZhklsuv";
/// After these letters the rest of the word is a value, if there is one.
const OPTIONAL: &str = "IKk";

/// Without a command in their words these read commands from their standard input, where files may be named as well.
const READS_COMMANDS: [&str; 2] = ["scontrol", "sacctmgr"];

/// A word that may name a file, and what the command has to do with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileWord<'a> {
    /// What sbatch submits, salloc starts or srun sends to the nodes.
    Program(&'a OsStr),
    /// The image of a container, which may be a directory.
    Image(&'a OsStr),
    /// Where output goes.
    Output(&'a OsStr),
    /// Where the command, or the job, begins.
    Directory(&'a OsStr),
    /// The value of another option of ours: sources of mounts are the node's.
    Container(&'a OsStr),
    /// Some other word.
    Value(&'a OsStr),
}

/// The words that may name files which the command reads; srun reads its program if `reads_program` or an option says so. Refuses
/// options of which it is not known whether a word follows.
pub fn file_words<'a>(
    command: &str,
    arguments: &'a [OsString],
    reads_program: bool,
) -> Result<Vec<FileWord<'a>>, Failure> {
    let mut words = Words { command, found: Vec::new(), reads_program: command != "srun" || reads_program };
    if !["srun", "sbatch", "salloc"].contains(&command) {
        if READS_COMMANDS.contains(&command) && !has_command(arguments) {
            return Err(Failure::new("its commands on standard input are not looked at").hint(format!(
                "inside a container, write the command behind {command}, as in `{command} show …`"
            )));
        }
        arguments.iter().for_each(|word| words.value(word));
        return Ok(words.found);
    }
    let mut programs = Vec::new();
    // The components of a heterogeneous job, each with options of its own; srun's also with a program.
    for component in arguments.split(|word| word == ":") {
        programs.extend(words.options(component)?);
        if command != "srun" && !programs.is_empty() {
            break;
        }
    }
    if words.reads_program {
        words.found.extend(programs.into_iter().map(FileWord::Program));
    }
    Ok(words.found)
}

/// Whether a word is a command, and not an option or its value; or one that ends at once.
fn has_command(arguments: &[OsString]) -> bool {
    let mut words = arguments.iter().map(|word| word.as_bytes());
    while let Some(word) = words.next() {
        match word {
            b"-h" | b"-V" | b"--help" | b"--usage" | b"--version" => return true,
            b"--" => return words.next().is_some(),
            b"-M" | b"--clusters" | b"--cluster" | b"-u" | b"--uid" => drop(words.next()),
            [b'-', _, ..] => {}
            _ => return true,
        }
    }
    false
}

/// What follows an option.
enum NextWord {
    /// Its value.
    Value,
    /// Its value, which names an image.
    Image,
    /// Its value, which names a file for output.
    Output,
    /// Its value, which is a directory.
    Directory,
    /// Its value, which is for a container.
    Container,
    /// Its value, which is a command and names no file.
    Command,
    /// Something else.
    Other,
}

struct Words<'a, 'c> {
    command: &'c str,
    found: Vec<FileWord<'a>>,
    reads_program: bool,
}

impl<'a> Words<'a, '_> {
    /// Goes through the options, and gives back the word after them.
    fn options(&mut self, arguments: &'a [OsString]) -> Result<Option<&'a OsStr>, Failure> {
        let mut words = arguments.iter().map(OsString::as_os_str);
        while let Some(word) = words.next() {
            let next = match word.as_bytes() {
                b"--" => return Ok(words.next()),
                [b'-', b'-', long @ ..] => self.long(long)?,
                [b'-', _, ..] => self.letters(word),
                _ => return Ok(Some(word)),
            };
            let Some(value) = (if let NextWord::Other = next { None } else { words.next() }) else {
                continue;
            };
            if value.len() > 1 && value.as_bytes().starts_with(b"-") {
                let [option, value] = [word, value].map(|word| quote(word.as_bytes()));
                return Err(Failure::new(format!("{value} may be the value of {option}, or an option"))
                    .hint("inside a container, write values that begin with - behind an equals sign: --option=-value"));
            }
            match next {
                NextWord::Other | NextWord::Command => {}
                NextWord::Value => self.value(value),
                NextWord::Image => self.found.push(FileWord::Image(value)),
                NextWord::Output => self.found.push(FileWord::Output(value)),
                NextWord::Directory => self.found.push(FileWord::Directory(value)),
                NextWord::Container => self.found.push(FileWord::Container(value)),
            }
        }
        Ok(None)
    }

    fn long(&mut self, option: &'a [u8]) -> Result<NextWord, Failure> {
        let (name, value) = match option.iter().position(|byte| *byte == b'=') {
            Some(equals) => (&option[..equals], Some(&option[equals + 1..])),
            None => (option, None),
        };
        // Slurm takes any beginning of a name.
        let means = |full: &str| full.as_bytes().starts_with(name);
        if self.command == "srun" && ["bcast", "multi-prog"].into_iter().any(means) {
            self.reads_program = true;
        }
        // A command of the new job, and no file of this one.
        let is_command = name.len() > 1 && means("wrap");
        let is_image = name.starts_with(b"container") && means("container-image");
        let is_ours = name.starts_with(b"container-");
        let is_output = (name.len() > 1 && ["output", "error"].into_iter().any(means))
            || (is_ours && name.len() > "container-".len() && means("container-save"));
        let kind = match () {
            () if is_command => NextWord::Command,
            () if is_image => NextWord::Image,
            () if is_output => NextWord::Output,
            () if means("chdir") => NextWord::Directory,
            () if is_ours => NextWord::Container,
            () => NextWord::Value,
        };
        let Some(value) = value.map(OsStr::from_bytes) else {
            let is_value = matches!(kind, NextWord::Value | NextWord::Container);
            return Ok(if is_value && self.is_flag(name)? { NextWord::Other } else { kind });
        };
        match kind {
            NextWord::Command | NextWord::Other => {}
            NextWord::Image => self.found.push(FileWord::Image(value)),
            NextWord::Output => self.found.push(FileWord::Output(value)),
            NextWord::Directory => self.found.push(FileWord::Directory(value)),
            NextWord::Container => self.found.push(FileWord::Container(value)),
            NextWord::Value => self.found.push(FileWord::Value(value)),
        }
        Ok(NextWord::Other)
    }

    /// Whether no word belongs to this option.
    fn is_flag(&self, name: &[u8]) -> Result<bool, Failure> {
        if name == b"wait" {
            return Ok(self.command == "sbatch");
        }
        let own = slurm_options::all();
        let is_own_flag = |option: &OptionSpec| !matches!(option.argument, Argument::Required(_));
        if let Some(option) = own.iter().find(|option| option.name.as_bytes() == name) {
            return Ok(is_own_flag(option));
        }
        let own_flags = own.iter().filter(|option| is_own_flag(option)).map(|option| option.name.as_ref());
        let mut flags = FLAGS.split_whitespace().chain(own_flags);
        match flags.clone().any(|flag| flag.as_bytes() == name) {
            false if name != b"container" && flags.any(|flag| flag.as_bytes().starts_with(name)) => {
                let shown = quote(&[b"--", name].concat());
                Err(Failure::new(format!("{shown} may be the beginning of several options"))
                    .hint("inside a container, write options of Slurm's commands in full"))
            }
            known => Ok(known),
        }
    }

    fn letters(&mut self, word: &'a OsStr) -> NextWord {
        let bytes = word.as_bytes();
        for (index, letter) in bytes.iter().enumerate().skip(1) {
            let letter = char::from(*letter);
            let is_flag = LETTERS.contains(letter) || (letter == 'W' && self.command == "sbatch");
            let rest = &bytes[index + 1..];
            if is_flag && (rest.is_empty() || !OPTIONAL.contains(letter)) {
                continue;
            }
            let rest = OsStr::from_bytes(rest);
            let (found, next) = match letter {
                'o' | 'e' => (FileWord::Output(rest), NextWord::Output),
                'D' => (FileWord::Directory(rest), NextWord::Directory),
                _ => (FileWord::Value(rest), NextWord::Value),
            };
            if rest.is_empty() {
                return next;
            }
            self.found.push(found);
            return NextWord::Other;
        }
        NextWord::Other
    }

    /// A word, and what follows an equals sign in it.
    fn value(&mut self, word: &'a OsStr) {
        self.file(word);
        if let Some(equals) = word.as_bytes().iter().position(|byte| *byte == b'=') {
            let (key, value) =
                (&word.as_bytes()[..equals], OsStr::from_bytes(&word.as_bytes()[equals + 1..]));
            // scontrol takes its keys in any case, and beginnings of them.
            let is_directory = key.len() > 1 && b"workdir".starts_with(&key.to_ascii_lowercase());
            self.found.push(if is_directory { FileWord::Directory(value) } else { FileWord::Value(value) });
        }
    }

    fn file(&mut self, name: &'a OsStr) {
        self.found.push(FileWord::Value(name));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The words as text, with `!` before a program.
    fn words(line: &str) -> String {
        let mut words = line.split(' ').map(OsString::from);
        let command = words.next().unwrap().into_string().unwrap();
        let arguments: Vec<OsString> = words.collect();
        let words = match file_words(&command, &arguments, false) {
            Ok(words) => words,
            Err(failure) => return failure.message,
        };
        let shown = words.into_iter().filter_map(|word| match word {
            FileWord::Program(name) => Some(format!("!{}", name.display())),
            FileWord::Output(name) => Some(format!(">{}", name.display())),
            FileWord::Directory(name) => Some(format!("{}/", name.display())),
            FileWord::Container(_) => None,
            FileWord::Image(name) | FileWord::Value(name) => {
                (!name.is_empty()).then(|| name.display().to_string())
            }
        });
        shown.collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn what_a_command_reads_is_found() {
        for (line, expected) in [
            ("sbatch job.sh /etc/passwd", "!job.sh"),
            ("sbatch -p debug -n2 --hold -HQ ./job.sh -n 3 x", "debug 2 !./job.sh"),
            ("sbatch --export-file=/e --input /i -o/o -- job.sh x", "/e /i >/o !job.sh"),
            ("sbatch --err=/a --output /b -e /c -o /d job.sh", ">/a >/b >/c >/d !job.sh"),
            ("sbatch -D/d --chdir=/e -D /f --chd /g job.sh", "/d/ /e/ /f/ /g/ !job.sh"),
            ("srun --container-mounts /x:/y --container-save=/s --container-mounts=/z prog", ">/s"),
            ("scontrol update JobId=1 WorkDir=/d", "update JobId=1 1 WorkDir=/d /d/"),
            ("sbatch --wait -W job.sh", "!job.sh"),
            ("sbatch --wrap /bin/true", ""),
            ("sbatch --wrap=/bin/true -n 2", "2"),
            ("sbatch -n1 : -n2 --exclusive job.sh : x", "1 2 !job.sh"),
            (
                "sbatch --container tf.sqsh --container-remap-root --no-container-mount-home job.sh",
                "tf.sqsh !job.sh",
            ),
            ("sbatch --container-writable job.sh", "!job.sh"),
            ("sbatch -k2 -kH job.sh", "2 H !job.sh"),
            ("salloc -n 2 /bin/prog /x", "2 !/bin/prog"),
            ("srun -l cat /etc/passwd", ""),
            ("srun -n 2 -lu --label /bin/cat /etc/passwd", "2"),
            ("srun --wait 10 /bin/cat /x", "10"),
            ("srun --bcast=/tmp/x -n 2 ./prog /y", "/tmp/x 2 !./prog"),
            ("srun --multi-prog file /y", "!file"),
            ("srun --multi file /y", "--multi may be the beginning of several options"),
            ("sbatch --be now /job.sh", "--be may be the beginning of several options"),
            ("sbatch --in /dev/null /job.sh", "--in may be the beginning of several options"),
            ("sbatch --beg now --in=/dev/null /job.sh", "now /dev/null !/job.sh"),
            ("srun --container-rem true", "--container-rem may be the beginning of several options"),
            ("srun -n1 ./a /x : --bcast ./b /y", "1 !./a !./b"),
            ("srun -i /in prog", "/in"),
            ("srun --bcast=/tmp/x --external-launcher ./prog", "/tmp/x !./prog"),
            (
                "srun --new-option --bcast=/tmp/x ./prog",
                "--bcast=/tmp/x may be the value of --new-option, or an option",
            ),
            ("srun -n --bcast ./prog", "--bcast may be the value of -n, or an option"),
            ("sbatch --comment=-x --nice=-5 job.sh", "-x -5 !job.sh"),
            // Of no release: the next word may be anything.
            ("srun --new-option /bin/cat /etc/passwd", "/bin/cat"),
            ("sbcast -f ./file /tmp/file", "-f ./file /tmp/file"),
            ("scontrol -o", "its commands on standard input are not looked at"),
            ("sacctmgr -i -M a", "its commands on standard input are not looked at"),
            ("scontrol -M a ping", "-M a ping"),
            ("scontrol --version", "--version"),
            ("scrontab tab", "tab"),
            ("strigger --program=/p", "--program=/p /p"),
            ("sbatch", ""),
            ("sbatch -", "!-"),
        ] {
            assert_eq!(words(line), expected, "{line}");
        }
    }
}
