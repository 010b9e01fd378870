//! The components of a heterogeneous job or step, in srun, sbatch and salloc: how each gets a request of its own. Slurm calls
//! `init_post_opt` for one component after the other, while all of them have one environment.
//!
//! - srun gives each component its own copy of `--export`. What that sets, the tasks of this component get and no others. So the
//!   request goes there, and not into srun's environment, which would win. The node has nothing to choose and cannot confuse
//!   anything.
//! - salloc's command starts when all components are known. The first request is in the usual variable, one that differs in a
//!   variable for its group, where a nested `srun --het-group` finds it.
//! - sbatch copies its environment into the first component's job before it looks at the second one, and the script's srun
//!   calls see that copy alone: different containers are refused.

use std::collections::BTreeSet;
use std::env::{args_os, var_os, vars_os};
use std::os::unix::ffi::{OsStrExt, OsStringExt};

use mizzen_core::failure::quote;
use mizzen_core::request::{GROUP_VARIABLE, UNASKED, VARIABLE};
use mizzen_core::{Failure, Request};

use crate::spank;
use crate::state::GivenOption;
use crate::{options, state};

/// Which groups of the job srun's components are for.
#[derive(Default)]
pub struct Groups {
    /// How many lists of options Slurm has begun with; a colon is between two of them.
    lists: u32,
    /// The other groups of the last one, which Slurm takes in ascending order.
    left: Vec<u32>,
}

impl Groups {
    /// Before the first component.
    pub const NONE: Groups = Groups { lists: 0, left: Vec::new() };

    /// The group of the next component. For each of the groups that `--het-group` lists, Slurm goes through the options once,
    /// and shows this one's number or the whole list. Without it the number of the list of options is the group's.
    pub fn next(&mut self, het_group: Option<&[u8]>) -> Result<u32, Failure> {
        if self.left.is_empty() {
            self.left = match het_group {
                Some(list) => read_groups(list).ok_or_else(|| unknown_group(list))?.into_iter().collect(),
                None => vec![self.lists],
            };
            self.lists += 1;
        }
        Ok(self.left.remove(0))
    }
}

fn unknown_group(list: &[u8]) -> Failure {
    let message =
        format!("--het-group={}: mizzen cannot tell which component's container is meant", quote(list));
    Failure::new(message).hint("write numbers and ranges: --het-group=0,2-3")
}

/// `0,2-4`, perhaps in brackets; never empty.
fn read_groups(list: &[u8]) -> Option<BTreeSet<u32>> {
    /// Slurm has no more components.
    const LIMIT: u32 = 128;
    let text = std::str::from_utf8(list).ok()?;
    let text = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).unwrap_or(text);
    let mut groups = BTreeSet::new();
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (first.parse::<u32>().ok()?, last.parse::<u32>().ok()?);
        if first > last || last >= LIMIT {
            return None;
        }
        groups.extend(first..=last);
    }
    Some(groups)
}

/// The request that this component inherits from the enclosing job: its group's, or the one that all of them have.
pub fn inherited(all: Option<&[u8]>, groups: &[(u32, Vec<u8>)]) -> Result<Option<Request>, Failure> {
    let own = if groups.is_empty() || !spank::is_srun() {
        None
    } else {
        let list = spank::own_option(c"het-group");
        let group = state::lock().groups.next(list.as_deref())?;
        groups.iter().find(|(number, _)| *number == group).map(|(_, text)| text.as_slice())
    };
    match own.or(all) {
        Some(text) if text == UNASKED.as_bytes() => Ok(None),
        text => text.map(Request::decode).transpose(),
    }
}

/// The requests of single components that the enclosing job hands down.
pub fn handed_down() -> Vec<(u32, Vec<u8>)> {
    let group = |name: &[u8]| {
        std::str::from_utf8(name.strip_prefix(GROUP_VARIABLE.as_bytes())?).ok()?.parse::<u32>().ok()
    };
    vars_os().filter_map(|(name, value)| Some((group(name.as_bytes())?, value.into_vec()))).collect()
}

/// sbatch, salloc: what the enclosing job's components have says nothing about those of the new job.
pub fn forget(groups: &[(u32, Vec<u8>)]) {
    for (group, _) in groups {
        spank::unset_variable(&group_variable(*group));
    }
}

/// salloc: the request of a later component that differs from the first one's. Slurm hands its options down to all steps: if the
/// first one asks for nothing, that must be said.
pub fn set_for_group(group: u32, first: Option<&Request>, request: Option<&Request>) {
    if first.is_none() {
        spank::set_variable(VARIABLE, UNASKED);
    }
    spank::set_variable(&group_variable(group), &text(request));
}

/// salloc, a later component: Slurm has left the options of those before it in the environment, and reported them as if they had
/// been given to this one, before its own.
pub fn take_handed_on_out(reported: &mut Vec<GivenOption>) {
    for (index, spec) in options::ALL.iter().enumerate() {
        if var_os(options::inherited_variable(spec)).is_none() {
            continue;
        }
        if let Some(first) = reported.iter().position(|option| option.index == index) {
            reported.remove(first);
        }
    }
}

/// srun and salloc hand Slurm's own `--container` on to the next component, which has not asked for it. So they forget it when
/// the request is made.
pub fn keep_container_option_apart() -> Result<(), Failure> {
    let hands_on = spank::is_srun() || spank::is_salloc();
    if !hands_on || !may_have_several(&words()) || spank::own_option(c"container").is_none() {
        return Ok(());
    }
    if options::slurm_has_container() && !spank::forget_own_option(c"container") {
        return Err(Failure::new("--container: Slurm would hand it on to the next component")
            .hint("use --container-image in a heterogeneous job"));
    }
    Ok(())
}

fn words() -> Vec<Vec<u8>> {
    args_os().skip(1).map(OsStringExt::into_vec).collect()
}

/// Whether the program may have several components.
fn may_have_several(words: &[Vec<u8>]) -> bool {
    spank::own_option(c"het-group").is_some() || words.iter().any(|word| word == b":")
}

fn group_variable(group: u32) -> String {
    format!("{GROUP_VARIABLE}{group}")
}

fn text(request: Option<&Request>) -> String {
    request.map_or_else(|| UNASKED.to_owned(), Request::encode)
}

/// Whether this is srun with components of which one may ask for a container. All of its words count: the first component is
/// done before Slurm reads the next one's options.
pub fn needs_one_request_each(container_wanted: bool) -> bool {
    if !spank::is_srun() {
        return false;
    }
    let words = words();
    may_have_several(&words) && (container_wanted || words.iter().any(|word| names_option(word)))
}

/// Whether this could be an option of ours. Slurm takes the beginning of a name for the name.
fn names_option(word: &[u8]) -> bool {
    let Some(name) = word.strip_prefix(b"--") else { return false };
    let name = name.split(|byte| *byte == b'=').next().unwrap_or_default();
    !name.is_empty() && options::ALL.iter().any(|spec| spec.name.as_bytes().starts_with(name))
}

/// `--export` of one component, before and after the request was put into it. Slurm hands the value on to the next component.
pub struct Exported {
    before: Option<Vec<u8>>,
    after: Vec<u8>,
}

/// srun's `--export` as the user has given it.
pub fn typed_export() -> Option<Vec<u8>> {
    let value = spank::own_option(c"export");
    match &state::lock().exported {
        Some(exported) if value.as_ref() == Some(&exported.after) => exported.before.clone(),
        _ => value,
    }
}

/// Puts the request into this component's `--export`; false if this Slurm does not let us. A component that asks for nothing
/// has that said: the options of the others reach its node as well.
pub fn export(request: Option<&Request>) -> bool {
    let before = typed_export();
    let list = before.clone().unwrap_or_else(|| b"ALL".to_vec());
    // A comma ends a variable there.
    let mut after = format!("{VARIABLE}={},", text(request).replace(',', "%2C")).into_bytes();
    after.extend(list);
    let done = spank::set_own_option(c"export", &after)
        && spank::own_option(c"export").is_some_and(|value| value == after);
    if done {
        spank::unset_variable(VARIABLE);
        state::lock().exported = Some(Exported { before, after });
    }
    done
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_counted_as_slurm_does() {
        let count = |lists: &[Option<&str>]| {
            let mut groups = Groups::NONE;
            lists.iter().map(|list| groups.next(list.map(str::as_bytes))).collect::<Result<Vec<_>, _>>()
        };
        assert_eq!(count(&[None, None, None]), Ok(vec![0, 1, 2]));
        assert_eq!(count(&[Some("0"), Some("1"), Some("3")]), Ok(vec![0, 1, 3]));
        assert_eq!(count(&[Some("1,0"), Some("1,0"), Some("3")]), Ok(vec![0, 1, 3]));
        assert_eq!(count(&[Some("[0-1]"), Some("[0-1]"), Some("[0-1]")]), Ok(vec![0, 1, 0]));
        assert_eq!(count(&[Some("4"), None]), Ok(vec![4, 1]));
        for nonsense in ["", "a", "1-", "2-1", "0,,1", "0-4294967295", "[0"] {
            let failure = count(&[Some(nonsense)]).unwrap_err();
            let message =
                format!("--het-group={nonsense}: mizzen cannot tell which component's container is meant");
            assert_eq!(failure.message, message);
        }
    }

    #[test]
    fn an_option_is_known_by_its_beginning() {
        for (word, expected) in [
            ("--container=a", true),
            ("--container-image", true),
            ("--container-im=a", true),
            ("--edf=a", true),
            ("--cpus-per-task=1", false),
            ("--", false),
            ("container", false),
        ] {
            assert_eq!(names_option(word.as_bytes()), expected, "{word}");
        }
    }
}
