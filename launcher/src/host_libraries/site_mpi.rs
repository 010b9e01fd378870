//! The node's MPI in place of the image's: for sites whose MPI is tuned to their network. Only within a family with one
//! ABI: a program that was built against Open MPI cannot use MPICH.

use std::path::Path;

use mizzen_core::Failure;
use mizzen_core::settings::Key;

use super::discover::{Candidate, Found, FoundSet, Node};
use super::image_libraries::ImageLibraries;
use super::rules::{Rule, Set};
use super::{DIRECTORY, HostLibraries};
use crate::mount::HostFile;
use crate::options::Origin;

impl HostLibraries {
    /// Puts the node's MPI before the image's. What does not fit is refused if the user has asked for it, and left out
    /// with a note if the site does for all images.
    pub(super) fn replace_mpi(
        &mut self,
        rule: &Rule,
        origin: Origin,
        node: &Node,
        image: &ImageLibraries,
    ) -> Result<(), Failure> {
        let before = self.clone();
        match self.put_mpi(rule, origin, node, image) {
            Ok(()) => Ok(()),
            Err(failure) if origin == Origin::Site => {
                *self = before;
                self.notes.push(format!("the image keeps its own MPI: {failure}"));
                Ok(())
            }
            Err(failure) => Err(failure.about(origin.name_of(Key::Mpi)).hint(format!(
                "{}=image uses the image's own; to use the node's, the program must be built for an MPI of its family",
                origin.name_of(Key::Mpi)
            ))),
        }
    }

    fn put_mpi(
        &mut self,
        rule: &Rule,
        origin: Origin,
        node: &Node,
        image: &ImageLibraries,
    ) -> Result<(), Failure> {
        // A family is known by its library for C, the first row.
        let main = |set: &Set| set.same.first().cloned().unwrap_or_default();
        let own = |set| Some((set, main(set).into_iter().find(|name| image.find(name).is_some())?));
        let images: Vec<(&Set, String)> = rule.sets.iter().filter_map(own).collect();
        if images.is_empty() && origin == Origin::Site {
            self.findings.push((rule.name.clone(), "the image has no MPI".to_owned()));
            return Ok(());
        }
        let offer = |set| Some((set, first_of(&main(set), rule, node)?));
        let offers: Vec<(&Set, Candidate)> = rule.sets.iter().filter_map(offer).collect();
        let wanted =
            |set: &Set| images.is_empty() || images.iter().any(|(family, _)| family.name == set.name);
        if offers.is_empty() {
            let names: Vec<&str> = rule.sets.iter().map(|set| set.name.as_str()).collect();
            return Err(Failure::new(format!("the node has no {}", names.join(" or "))));
        }
        if !offers.iter().any(|(set, _)| wanted(set)) {
            let has: Vec<String> =
                images.iter().map(|(set, name)| format!("{} ({name})", set.name)).collect();
            let offered = offers.iter().map(|(set, found)| format!("{} ({})", set.name, found.file_name()));
            let (has, offered) = (has.join(" and "), offered.collect::<Vec<_>>().join(" and "));
            return Err(Failure::new(format!(
                "the image has {has}, and the node {offered}: what is built for one cannot use the other"
            )));
        }
        offers
            .iter()
            .filter(|(set, _)| wanted(set))
            .try_for_each(|(set, _)| self.put_family(set, rule, node, image))
    }

    fn put_family(
        &mut self,
        set: &Set,
        rule: &Rule,
        node: &Node,
        image: &ImageLibraries,
    ) -> Result<(), Failure> {
        let mut found_set = FoundSet::of(set.clone());
        for candidate in set.same.iter().filter_map(|row| first_of(row, rule, node)) {
            found_set.libraries.insert(candidate.name.clone(), vec![candidate]);
        }
        for pattern in &set.optional {
            found_set.libraries.extend(node.libraries(pattern, &rule.directories));
        }
        let found = Found { version: None, gpus: Vec::new(), devices: Vec::new(), sets: vec![found_set] };
        let notes = self.notes.len();
        let decisions = self.check(&rule.name, &found, &rule.directories, node, image);
        self.notes.truncate(notes); // what follows says it
        let Some(decisions) = decisions else {
            let message = format!("the node's {} needs glibc, which the image does not have", set.name);
            return Err(Failure::new(message));
        };
        for row in &set.same {
            let given = decisions.iter().find(|decision| row.contains(&decision.candidate.name));
            let Some(decision) = given else { continue };
            if let Some(incompatibility) = &decision.incompatibility {
                let (name, file) = (&set.name, decision.candidate.file.display());
                let message =
                    format!("the node's {name} ({file}) does not fit the image: {}", incompatibility.text());
                return Err(Failure::new(message));
            }
            let file = decision.candidate.file_name();
            for name in row.iter().filter(|name| **name != file) {
                self.links.insert(Path::new("lib").join(name), file.clone());
            }
        }
        decisions
            .iter()
            .filter(|decision| decision.incompatibility.is_none())
            .for_each(|decision| self.take(decision));
        self.add_beside(set, node);
        Ok(())
    }

    /// Directories that belong to the libraries of a set, and its variables, except those that name a directory which
    /// the node lacks.
    pub(super) fn add_beside(&mut self, set: &Set, node: &Node) {
        let mut missing = Vec::new();
        for (name, directory) in &set.beside {
            let Some(source) = node.directory(directory) else {
                missing.push(format!("{{lib}}/{name}"));
                continue;
            };
            self.findings
                .push((source.display().to_string(), format!("beside the libraries of {}", set.name)));
            self.files.push(HostFile { place: Path::new("lib").join(name), source });
        }
        let lib = format!("{DIRECTORY}/lib");
        for (name, value) in &set.environment {
            if !missing.iter().any(|missing| value.contains(missing)) {
                let drivers = self.verbs_drivers(&lib);
                let value = value.replace("{lib}", &lib).replace("{verbs_drivers}", &drivers);
                self.variables.set.insert(name.clone(), value);
            }
        }
    }

    /// The providers of libibverbs, as its variable RDMAV_DRIVERS names them: without the end of their names.
    fn verbs_drivers(&self, lib: &str) -> String {
        let files = self.files.iter().map(|file| &file.place);
        let names = files.chain(self.links.keys()).filter_map(|place| place.file_name()?.to_str());
        let drivers =
            names.filter_map(|name| name.split_once("-rdmav").map(|(driver, _)| format!("{lib}/{driver}")));
        drivers.collect::<Vec<_>>().join(":")
    }
}

/// The first of these names that the node has a library for this machine by.
fn first_of(names: &[String], rule: &Rule, node: &Node) -> Option<Candidate> {
    names.iter().find_map(|name| {
        let found = node.libraries(name, &rule.directories).remove(name)?;
        found.into_iter().find(|candidate| candidate.library.is_some())
    })
}
