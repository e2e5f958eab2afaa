//! The server that cells talk to: one that is there, or one of our own for each set of flags.

use std::path::Path;

use super::adapter::{self, Shape};
use super::args::Target;
use super::cells::{Capabilities, Fill};
use super::client::{ClientError, Endpoint};
use super::server::{Server, ServerError};
use super::temp_folder::TempFolder;

/// The server.
pub struct Host {
    target: Target,
    server: Option<Server>,
    /// Holds the adapter.
    folder: Option<TempFolder>,
}

impl Host {
    /// Nothing runs yet.
    pub fn new(target: Target) -> Self {
        Self { target, server: None, folder: None }
    }

    /// What cells it can have.
    pub fn capabilities(&self) -> Capabilities {
        match self.target {
            Target::Own { .. } => Capabilities::of_this_program(),
            Target::Foreign { .. } => Capabilities::foreign(),
        }
    }

    /// Flags of the user.
    pub fn user_flags(&self) -> &[String] {
        match &self.target {
            Target::Own { flags, .. } => flags,
            Target::Foreign { .. } => &[],
        }
    }

    /// What is measured.
    pub fn stack(&self) -> &str {
        match &self.target {
            Target::Own { .. } => "mlx-bun",
            Target::Foreign { stack, .. } => stack,
        }
    }

    /// The address of a server that is there.
    pub fn url(&self) -> Option<&str> {
        match &self.target {
            Target::Own { .. } => None,
            Target::Foreign { endpoint, .. } => Some(endpoint.base()),
        }
    }

    /// The model's folder, file or name.
    pub fn model(&self) -> String {
        self.target.model()
    }

    /// What stands in for the letters in a cell's flags; an adapter is written when the first asks for it.
    pub fn fill(&mut self, batch: usize, adapter: bool) -> Fill {
        let Target::Own { source, .. } = &self.target else {
            return Fill { batch, group: None, adapter: None };
        };
        let shape = Shape::of(source).ok();
        if adapter && self.folder.is_none() {
            self.folder = shape.and_then(|shape| {
                let folder = TempFolder::new().ok()?;
                adapter::write(folder.path(), shape).ok()?;
                Some(folder)
            });
        }
        let path = |folder: &TempFolder| Path::new(folder.path()).display().to_string();
        Fill {
            batch,
            group: shape.and_then(|shape| Fill::group_of(shape.head_dim)),
            adapter: self.folder.as_ref().map(path),
        }
    }

    /// A server with these flags: the one that runs if it has them and may be used again, else a new one.
    ///
    /// # Errors
    /// It does not start.
    pub fn endpoint(
        &mut self,
        flags: &[String],
        again: bool,
        stop: &dyn Fn() -> bool,
    ) -> Result<Endpoint, ServerError> {
        let (source, user, timeout) = match &self.target {
            Target::Foreign { endpoint, .. } => return Ok(endpoint.clone()),
            Target::Own { source, flags, timeout } => (source, flags, *timeout),
        };
        let mut all = vec!["--model".to_owned(), source.path().display().to_string()];
        // Prompts are new ones; keeping them would only take memory.
        all.extend(["--prompt-cache".to_owned(), "0".to_owned()]);
        all.extend(flags.iter().chain(user).cloned());
        let server = match self.server.take().filter(|server| again && server.flags() == all) {
            Some(server) => server,
            None => Server::start(&all, stop)?,
        };
        let key = crate::env::get(crate::env::MLX_BUN_API_KEY);
        let endpoint = Endpoint::new(server.url(), key, None, timeout);
        self.server = Some(server);
        Ok(endpoint)
    }

    /// The most memory the server has had at once; unknown of one that was there.
    pub fn peak_bytes(&self) -> Option<u64> {
        self.server.as_ref()?.peak_bytes()
    }
}

/// Whether an error says that the server or the model has no such feature, whose names are `features`, rather than that
/// it went wrong.
pub fn is_refusal(error: &anyhow::Error, features: &[&str]) -> bool {
    let said = match (error.downcast_ref::<ClientError>(), error.downcast_ref::<ServerError>()) {
        (Some(ClientError::Status { status: 400 | 404 | 422 | 501, message }), _) => message,
        (_, Some(ServerError::Ended(why))) => why,
        _ => return false,
    };
    features.iter().any(|feature| said.contains(feature)) && !said.contains("os error")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_missing_feature_makes_a_cell_unavailable() {
        let features = &["--kv-quant", "quantized KV cache"];
        let said = |status: u16, message: &str| {
            is_refusal(&ClientError::Status { status, message: message.to_owned() }.into(), features)
        };
        assert!(said(400, "a quantized KV cache with group size 64 needs a head dimension that it divides"));
        assert!(!said(400, "the prompt is longer than the context"));
        assert!(!said(429, "the quantized KV cache is full") && !said(401, "--kv-quant"));
        let ended = |why: &str| is_refusal(&ServerError::Ended(why.to_owned()).into(), features);
        assert!(ended("`--kv-quant 8` cannot be used with this model"));
        assert!(!ended("it said nothing") && !ended("cannot open `--kv-quant`: denied (os error 13)"));
        assert!(!is_refusal(&ClientError::Empty.into(), features));
        // Where nothing is optional, nothing is.
        let refused = ClientError::Status { status: 400, message: "no".to_owned() };
        assert!(!is_refusal(&refused.into(), &[]));
    }
}
