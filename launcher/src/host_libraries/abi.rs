//! The decision which of the node's libraries can be loaded by the image's programs, before any of them is bound.
//!
//! A library that needs a newer C library than the image's ends the program that loads it, with a message that names
//! neither the image nor the node. So each is compared with what it will meet inside: symbol versions of the C and C++
//! libraries, and private ones by which libraries of one project know each other.

use super::discover::{Candidate, Found, Node};
use super::image_libraries::ImageLibraries;
use super::pattern;
use super::rules::belongs_to_libc;
use crate::elf::Requirement;

/// What happens to a library or program of the node, and why.
#[derive(Clone, Debug)]
pub struct Decision {
    /// The file.
    pub candidate: Candidate,
    /// The set that it belongs to, by its place in the rule's choice.
    pub set: usize,
    /// Whether it is a library, or a program.
    pub kind: Kind,
    /// Why it is not given to the container; none if it is.
    pub incompatibility: Option<Incompatibility>,
}

/// Why a file is wanted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A library of the set.
    Library,
    /// One that nobody misses.
    Optional,
    /// A library that another one needs and the image lacks.
    NeededBy(String),
    /// A program of the set.
    Program,
}

/// Why a file of the node is of no use in an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Incompatibility {
    /// It is made for another machine, or broken.
    Foreign,
    /// It belongs to another driver than the one in the kernel.
    OtherDriver {
        /// Its version.
        own: String,
        /// The driver's.
        driver: String,
    },
    /// It needs a library that neither the image nor the node has.
    Lacks(String),
    /// It needs a newer or another library than the image has.
    Version {
        /// The version that it needs.
        needs: String,
        /// Of this library.
        of: String,
        /// The newest that is there, of the same kind.
        has: Option<String>,
    },
    /// Programs and libraries of the image could not use it in place of the image's own.
    Displaces {
        /// The version of it that they need.
        needs: String,
        /// The library of the image that does; none if it may be any program.
        by: Option<String>,
        /// The newest that it has, of the same kind.
        has: Option<String>,
    },
    /// It needs one that is left out.
    Follows(String),
    /// It fits only together with one that is left out.
    Unmatched(String),
}

impl Incompatibility {
    /// The reason, to be read after the name of the file.
    pub fn text(&self) -> String {
        match self {
            Incompatibility::Foreign => "it is not made for this machine, or broken".to_owned(),
            Incompatibility::OtherDriver { own, driver } => {
                format!("its version is {own}, and the kernel's driver has {driver}")
            }
            Incompatibility::Lacks(library) => {
                format!("it needs {library}, which is neither in the image nor on the node")
            }
            Incompatibility::Version { needs, of, has: Some(has) } => {
                format!("it needs {needs}, and the image's {of} has up to {has}")
            }
            Incompatibility::Version { needs, of, has: None } => {
                format!("it needs {needs}, which the image's {of} does not have")
            }
            Incompatibility::Displaces { needs, by, has } => {
                let who = by
                    .as_deref()
                    .map_or("the image's own has".to_owned(), |by| format!("the image's {by} needs"));
                let has = has.as_deref().map_or("it does not".to_owned(), |has| format!("it has {has}"));
                format!("{who} {needs}, and {has}")
            }
            Incompatibility::Follows(library) => format!("it needs {library}, which is left out"),
            Incompatibility::Unmatched(library) => {
                format!("it fits only together with {library}, which is left out")
            }
        }
    }

    /// What the user can do, if anything.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            Incompatibility::Version { needs, .. }
                if needs.starts_with("GLIBC") || needs.starts_with("CXXABI") =>
            {
                Some("an image of a newer distribution has it")
            }
            Incompatibility::OtherDriver { .. } => {
                Some("the node's administrator has to install the libraries of that driver")
            }
            _ => None,
        }
    }
}

/// Decides for everything that was found. An image with another C library than glibc must have been ruled out.
pub fn decide(found: &Found, directories: &[String], node: &Node, image: &ImageLibraries) -> Vec<Decision> {
    let mut decisions = Vec::new();
    for (set, found_set) in found.sets.iter().enumerate() {
        let mut libraries: Vec<_> = found_set.libraries.iter().collect();
        // In the rule's order: what is missed first is told first.
        libraries.sort_by_key(|(name, _)| found_set.set.position(name));
        for (name, candidates) in libraries {
            let optional = |pattern: &String| pattern::matches(pattern::file_name(pattern), name);
            let kind =
                if found_set.set.optional.iter().any(optional) { Kind::Optional } else { Kind::Library };
            decisions.extend(choose(candidates, found.version.as_deref(), set, kind));
        }
        for program in &found_set.programs {
            decisions.extend(choose(std::slice::from_ref(program), None, set, Kind::Program));
        }
    }
    add_dependencies(&mut decisions, directories, node, image);
    // What is left out may be what others need.
    loop {
        let misfits: Vec<(usize, Incompatibility)> = decisions
            .iter()
            .enumerate()
            .filter(|(_, decision)| decision.incompatibility.is_none())
            .filter_map(|(index, decision)| {
                let incompatibility = check(decision, &decisions, image);
                Some((
                    index,
                    incompatibility.or_else(|| check_displaced(decision, &decisions, found, image))?,
                ))
            })
            .collect();
        let unmatched = misfits_of_sets(&decisions, found, &misfits);
        if misfits.is_empty() && unmatched.is_empty() {
            return decisions;
        }
        for (index, incompatibility) in unmatched.into_iter().chain(misfits) {
            decisions[index].incompatibility = Some(incompatibility);
        }
    }
}

/// Of several files of one name the first that is for this machine and the kernel's driver.
fn choose(candidates: &[Candidate], driver: Option<&str>, set: usize, kind: Kind) -> Option<Decision> {
    let incompatibility = |candidate: &Candidate| match (candidate.version(), driver) {
        _ if candidate.library.is_none() && kind != Kind::Program => Some(Incompatibility::Foreign),
        (Some(own), Some(driver)) if own != driver => {
            Some(Incompatibility::OtherDriver { own, driver: driver.to_owned() })
        }
        _ => None,
    };
    let fitting = candidates.iter().find(|candidate| incompatibility(candidate).is_none());
    let native = candidates.iter().find(|candidate| candidate.library.is_some());
    let candidate = fitting.or(native).or(candidates.first())?;
    Some(Decision { incompatibility: incompatibility(candidate), candidate: candidate.clone(), set, kind })
}

/// Adds libraries of the node that others need and the image lacks; and those that these need.
fn add_dependencies(
    decisions: &mut Vec<Decision>,
    directories: &[String],
    node: &Node,
    image: &ImageLibraries,
) {
    let mut next = 0;
    while let Some(decision) = decisions.get(next) {
        next += 1;
        let (set, name) = (decision.set, decision.candidate.file_name());
        let needed = match (&decision.incompatibility, &decision.candidate.library) {
            (None, Some(library)) => library.needed.clone(),
            _ => continue,
        };
        for needed in needed {
            if belongs_to_libc(&needed)
                || provider(&needed, decisions).is_some()
                || image.find(&needed).is_some()
            {
                continue;
            }
            let candidates = node.libraries(&needed, directories).remove(&needed).unwrap_or_default();
            decisions.extend(choose(&candidates, None, set, Kind::NeededBy(name.clone())));
        }
    }
}

/// The library of the node that a program inside will find by this name.
fn provider<'a>(name: &str, decisions: &'a [Decision]) -> Option<&'a Decision> {
    decisions.iter().find(|decision| {
        let library = decision.candidate.library.as_ref().filter(|_| decision.kind != Kind::Program);
        library
            .is_some_and(|library| decision.candidate.name == name || library.soname.as_deref() == Some(name))
    })
}

fn check(decision: &Decision, decisions: &[Decision], image: &ImageLibraries) -> Option<Incompatibility> {
    let library = decision.candidate.library.as_ref()?; // a script
    for name in &library.needed {
        match provider(name, decisions) {
            Some(Decision { incompatibility: None, .. }) => {}
            // The image's own may do.
            Some(_) if image.find(name).is_none() => return Some(Incompatibility::Follows(name.clone())),
            None if image.find(name).is_none() => return Some(Incompatibility::Lacks(name.clone())),
            Some(_) | None => {}
        }
    }
    let mut missing: Vec<(String, &String, Option<String>)> = Vec::new();
    for Requirement { library: of, version } in &library.requires {
        let own = provider(of, decisions).filter(|provider| provider.incompatibility.is_none());
        let images = image.find(of);
        let offers = match (own.and_then(|own| own.candidate.library.as_ref()), &images) {
            (Some(library), _) => &library.offers,
            (None, Some(library)) => &library.offers,
            (None, None) => continue, // said above
        };
        // A library without versions is taken for what is needed; the dynamic linker warns.
        if !offers.is_empty() && !offers.contains(version) {
            missing.push((version.clone(), of, newest(version, offers.iter()).map(str::to_owned)));
        }
    }
    // Of one library's versions the newest: an image with that has all of them.
    let (first, of, has) = missing.first()?;
    let of_same = missing.iter().filter(|(_, other, _)| other == of).map(|(version, ..)| version);
    let needs = newest(first, of_same).unwrap_or(first).to_owned();
    Some(Incompatibility::Version { needs, of: (*of).clone(), has: has.clone() })
}

/// Whether a library of a matched set can take the place of the image's own. The image's programs may need any of the
/// versions that this one offers, except private ones: those are needed by libraries of the same project, of which the
/// set's are looked at.
fn check_displaced(
    decision: &Decision,
    decisions: &[Decision],
    found: &Found,
    image: &ImageLibraries,
) -> Option<Incompatibility> {
    let set = found.sets.get(decision.set).map(|found| &found.set).filter(|set| set.matched)?;
    let library = decision.candidate.library.as_ref().filter(|_| decision.kind != Kind::Program)?;
    let soname = library.soname.as_ref().unwrap_or(&decision.candidate.name);
    let images = image.find(soname).filter(|_| !library.offers.is_empty())?;
    let incompatibility = |needs: &String, by: Option<&String>| Incompatibility::Displaces {
        needs: needs.clone(),
        by: by.cloned(),
        has: newest(needs, library.offers.iter()).map(str::to_owned),
    };
    let mut lost = images.offers.difference(&library.offers).filter(|version| !version.contains("PRIVATE"));
    if let Some(version) = lost.next() {
        return Some(incompatibility(version, None));
    }
    let names = set.libraries.iter().chain(&set.optional);
    names.filter(|name| provider(name, decisions).is_none_or(|own| own.incompatibility.is_some())).find_map(
        |name| {
            let other = image.find(name)?;
            let requirements = other.requires.iter().filter(|requirement| requirement.library == *soname);
            let mut missing =
                requirements.filter(|requirement| !library.offers.contains(&requirement.version));
            missing.next().map(|requirement| incompatibility(&requirement.version, Some(name)))
        },
    )
}

/// Of a matched set all are left out with the first.
fn misfits_of_sets(
    decisions: &[Decision],
    found: &Found,
    misfits: &[(usize, Incompatibility)],
) -> Vec<(usize, Incompatibility)> {
    let mut unmatched = Vec::new();
    for (set, _) in found.sets.iter().enumerate().filter(|(_, found)| found.set.matched) {
        let left_out = |index: usize, decision: &Decision| {
            decision.set == set
                && decision.kind == Kind::Library
                && (decision.incompatibility.is_some()
                    || misfits.iter().any(|(incompatibility, _)| *incompatibility == index))
        };
        let first = decisions.iter().enumerate().find(|(index, decision)| left_out(*index, decision));
        let Some((first, reason)) = first else { continue };
        let others = decisions.iter().enumerate().filter(|(index, decision)| {
            *index != first && decision.set == set && decision.incompatibility.is_none()
        });
        unmatched.extend(
            others.map(|(index, _)| (index, Incompatibility::Unmatched(reason.candidate.file_name()))),
        );
    }
    unmatched
}

/// The newest version of the same kind: of GLIBC_2.38 the highest GLIBC_ number.
fn newest<'a>(needed: &str, offers: impl Iterator<Item = &'a String>) -> Option<&'a str> {
    let split = |version: &str| -> Option<(String, Vec<u32>)> {
        let (kind, number) = version.rsplit_once('_')?;
        let parts: Result<Vec<u32>, _> = number.split('.').map(str::parse).collect();
        Some((kind.to_owned(), parts.ok()?))
    };
    let (kind, _) = split(needed)?;
    let same =
        offers.filter_map(|offer| split(offer).filter(|(own, _)| *own == kind).map(|(_, n)| (n, offer)));
    same.max().map(|(_, offer)| offer.as_str())
}

#[cfg(test)]
mod tests;
