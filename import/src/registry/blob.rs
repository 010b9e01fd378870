//! A blob as a stream, which goes on where it stopped: after a lost connection, a stall, a token that has ended.
//!
//! What is read is hashed as it goes by. The end is told only if size and digest are those of the descriptor: instead of the
//! last `Ok(0)` there is an error. So whoever uses the content must read to the end before anybody sees it. Failures do not name
//! the image: who reads a layer says of what.
//!
//! Run by: the user, in the importer.

use std::collections::VecDeque;
use std::io::{self, Read};
use std::sync::Arc;
use std::time::{Duration, Instant};

use mizzen_core::{Failure, Reference};

use super::backoff::Backoff;
use super::client::Inner;
use super::endpoint::Endpoint;
use super::status::{self, Subject};
use super::transport::{Method, Request, Response, Trouble, TroubleKind, Url};
use crate::manifest::{Descriptor, Hasher, wrong_digest, wrong_size};

/// So many bytes are progress: the count of attempts begins anew.
const PROGRESS: u64 = 64 << 10;
/// A server that sends less in a second, on average, is as good as one that stalls.
const LEAST_PER_SECOND: u64 = 1 << 10;

/// Where a blob can be had.
enum Source {
    /// From the registry or a mirror, with credentials.
    Registry(Box<Endpoint>),
    /// From anywhere, without.
    Foreign(Url),
}

/// An answer that is being read.
struct Body {
    reader: Box<dyn Read + Send>,
    url: Url,
    /// What comes again, because the server does not know ranges.
    skip: u64,
}

/// A stream of a blob's bytes.
pub struct Blob {
    inner: Arc<Inner>,
    reference: Reference,
    descriptor: Descriptor,
    sources: VecDeque<Source>,
    body: Option<Body>,
    hasher: Option<Hasher>,
    delivered: u64,
    backoff: Backoff,
    /// Where progress was last seen.
    mark: u64,
    /// Time that was spent waiting for bytes, and their number.
    window: (Duration, u64),
    outcome: Option<Result<(), Failure>>,
}

impl Blob {
    /// Begins to fetch from the servers behind the reference.
    pub(super) fn open(
        inner: Arc<Inner>,
        reference: &Reference,
        descriptor: &Descriptor,
    ) -> Result<Blob, Failure> {
        let endpoints = inner.endpoints(&reference.registry)?;
        let sources = endpoints.into_iter().map(|endpoint| Source::Registry(Box::new(endpoint))).collect();
        Blob::begin(inner, reference, descriptor, sources)
    }

    /// Begins to fetch from the addresses in the descriptor.
    pub(super) fn open_foreign(
        inner: Arc<Inner>,
        reference: &Reference,
        descriptor: &Descriptor,
    ) -> Result<Blob, Failure> {
        let about = |failure: Failure| failure.about(descriptor.digest);
        let urls: Result<_, Failure> =
            descriptor.urls.iter().map(|url| Url::parse(url).map(Source::Foreign)).collect();
        let sources: VecDeque<Source> = urls.map_err(about)?;
        if sources.is_empty() {
            return Err(about(Failure::new("the manifest does not say where else this layer is")));
        }
        Blob::begin(inner, reference, descriptor, sources)
    }

    fn begin(
        inner: Arc<Inner>,
        reference: &Reference,
        descriptor: &Descriptor,
        sources: VecDeque<Source>,
    ) -> Result<Blob, Failure> {
        let mut blob = Blob {
            inner,
            reference: reference.clone(),
            descriptor: descriptor.clone(),
            sources,
            body: None,
            hasher: Some(descriptor.digest.hasher()),
            delivered: 0,
            backoff: Backoff::default(),
            mark: 0,
            window: (Duration::ZERO, 0),
            outcome: None,
        };
        blob.connect()?;
        Ok(blob)
    }

    /// Reads what is left and verifies it. Whoever has stopped before the end has not seen whether it is the right blob.
    pub fn finish(mut self) -> Result<(), Failure> {
        io::copy(&mut self, &mut io::sink()).map(drop).map_err(super::failure_of)
    }

    /// Gets an answer that begins where we are.
    fn connect(&mut self) -> Result<(), Failure> {
        while self.body.is_none() {
            match self.ask() {
                Ok(body) => self.body = Some(body),
                Err(trouble) => self.overcome(trouble)?,
            }
        }
        Ok(())
    }

    /// Waits, or goes on to the next source, or gives up.
    fn overcome(&mut self, trouble: Trouble) -> Result<(), Failure> {
        self.body = None;
        self.window = (Duration::ZERO, 0);
        let mirror = match self.sources.front() {
            Some(Source::Registry(endpoint)) if endpoint.is_mirror => Some(endpoint),
            _ => None,
        };
        // A mirror that has sent nothing yet is not waited for: the registry is behind it.
        let hopeful = mirror.is_none() || self.delivered > 0;
        let trouble = match hopeful {
            true => {
                let was_there = self.delivered > 0;
                let (timing, notes) = (self.inner.transport.timing(), &self.inner.notes);
                match self.backoff.wait(trouble, was_there, timing, notes) {
                    Ok(()) => return Ok(()),
                    Err(trouble) => trouble,
                }
            }
            false => trouble,
        };
        if let Some(mirror) = mirror {
            self.inner.note_mirror(mirror, &trouble, &self.reference.registry);
        }
        self.sources.pop_front();
        if self.sources.is_empty() {
            return Err(trouble.failure);
        }
        self.backoff = Backoff::default();
        Ok(())
    }

    fn ask(&self) -> Result<Body, Trouble> {
        let offset = self.delivered;
        let response = match self.sources.front() {
            Some(Source::Registry(endpoint)) => {
                let name = self.descriptor.digest.to_string();
                let url = endpoint.path(&self.reference.repository, "blobs", &name);
                let request = Request { offset, ..Request::new(Method::Get, url) };
                let response = self.inner.authorized(&self.reference, endpoint, request)?;
                if !matches!(response.status, 200 | 206) {
                    return Err(self.inner.refusal(response, endpoint, Subject::Blob, &self.reference));
                }
                response
            }
            Some(Source::Foreign(url)) => {
                let request = Request { offset, ..Request::new(Method::Get, url.clone()) };
                // The registry's manifest has named it.
                let named =
                    Endpoint::of_registry(&self.reference.registry, url.scheme).map_err(Trouble::lasting)?;
                let response = self.inner.transport.send(&request, &named.url)?;
                if !matches!(response.status, 200 | 206) {
                    return Err(status::of_other_server(response));
                }
                response
            }
            None => return Err(Trouble::lasting(Failure::new("there is nobody to ask"))),
        };
        let url = response.url.clone();
        let skip =
            self.skip(&response).map_err(|failure| Trouble::lasting(failure.about(url.authority())))?;
        Ok(Body { reader: Box::new(response.into_reader()), url, skip })
    }

    /// How much of an answer has been read before; a failure if it is not about the same number of bytes.
    fn skip(&self, response: &Response) -> Result<u64, Failure> {
        let Descriptor { digest, size, .. } = &self.descriptor;
        if response.status == 200 {
            return match response.length() {
                Some(length) if length != *size => Err(wrong_size(digest, length, *size)),
                _ => Ok(self.delivered),
            };
        }
        let range = response.header("content-range").and_then(parse_range);
        match range {
            Some((_, Some(total))) if total != *size => Err(wrong_size(digest, total, *size)),
            Some((first, _)) if first == self.delivered => Ok(0),
            _ => Err(Failure::new(format!("{digest}: it sends another part than was asked for"))),
        }
    }

    fn fill(&mut self, buffer: &mut [u8]) -> Result<usize, Failure> {
        loop {
            if self.delivered == self.descriptor.size {
                return self.end().map(|()| 0);
            }
            self.connect()?;
            match self.receive(buffer) {
                Ok(0) => {}
                Ok(length) => {
                    self.take(&buffer[..length])?;
                    return Ok(length);
                }
                Err(trouble) => self.overcome(trouble)?,
            }
        }
    }

    /// The next bytes that were not there before; none if only such came that were.
    fn receive(&mut self, buffer: &mut [u8]) -> Result<usize, Trouble> {
        let Some(body) = &mut self.body else { return Ok(0) };
        let begin = Instant::now();
        let length = match body.reader.read(buffer) {
            Ok(0) => {
                let early = io::Error::from(io::ErrorKind::UnexpectedEof);
                return Err(Trouble::of_answer(&early, &body.url));
            }
            Ok(length) => length,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => return Ok(0),
            Err(error) => return Err(Trouble::of_answer(&error, &body.url)),
        };
        self.window.0 += begin.elapsed();
        self.window.1 += length as u64;
        if self.window.0 >= self.inner.transport.timing().read {
            let (time, bytes) = std::mem::replace(&mut self.window, (Duration::ZERO, 0));
            if (bytes as f64) < LEAST_PER_SECOND as f64 * time.as_secs_f64() {
                let seconds = time.as_secs();
                let failure =
                    Failure::new(format!("it has sent {bytes} bytes in {seconds} s, which is too slow"));
                return Err(Trouble {
                    failure: failure.about(body.url.authority()),
                    kind: TroubleKind::Passing,
                });
            }
        }
        let again = usize::try_from(body.skip).unwrap_or(usize::MAX).min(length);
        body.skip -= again as u64;
        buffer.copy_within(again..length, 0);
        Ok(length - again)
    }

    /// Counts and hashes bytes before they are given away.
    fn take(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        if bytes.len() as u64 > self.descriptor.size - self.delivered {
            return Err(self.too_long());
        }
        self.delivered += bytes.len() as u64;
        if let Some(hasher) = &mut self.hasher {
            hasher.update(bytes);
        }
        if self.delivered - self.mark >= PROGRESS {
            (self.mark, self.backoff) = (self.delivered, Backoff::default());
        }
        Ok(())
    }

    /// All bytes are there: are they the right ones, and is there nothing behind them?
    fn end(&mut self) -> Result<(), Failure> {
        // A connection that is lost now has lost nothing.
        if self.body.take().is_some_and(|mut body| matches!(body.reader.read(&mut [0]), Ok(1..))) {
            return Err(self.too_long());
        }
        let expected = self.descriptor.digest;
        match self.hasher.take().map(Hasher::finish) {
            Some(found) if found != expected => Err(wrong_digest(&expected, &found)),
            _ => Ok(()),
        }
    }

    fn too_long(&self) -> Failure {
        let Descriptor { digest, size, .. } = &self.descriptor;
        Failure::new(format!("{digest}: it has more than the {size} bytes that the manifest says"))
    }
}

impl Read for Blob {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if buffer.is_empty() {
            return Ok(0);
        }
        match &self.outcome {
            Some(Ok(())) => return Ok(0),
            Some(Err(failure)) => return Err(io::Error::other(failure.clone())),
            None => {}
        }
        let filled = self.fill(buffer);
        match &filled {
            Ok(0) => self.outcome = Some(Ok(())),
            Ok(_) => {}
            Err(failure) => self.outcome = Some(Err(failure.clone())),
        }
        filled.map_err(io::Error::other)
    }
}

/// `bytes FIRST-LAST/TOTAL`, where the total may be `*`.
pub(super) fn parse_range(text: &str) -> Option<(u64, Option<u64>)> {
    let (range, total) = text.trim().strip_prefix("bytes ")?.split_once('/')?;
    let (first, _) = range.split_once('-')?;
    let total = if total == "*" { None } else { Some(total.trim().parse().ok()?) };
    Some((first.trim().parse().ok()?, total))
}
