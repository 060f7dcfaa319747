//! Probes at load whether a chat template renders message contents at all. One that ignores them would give every
//! conversation the same prompt; one that fails gives none.

use crate::{ChatBody, PrefixError};

/// Maximum characters of an error's text kept.
const MAX_MESSAGE_CHARS: usize = 300;

/// Two conversations that must not have the same prompt. Only the user role is accepted by all templates.
const PROBE_MESSAGES: [&str; 2] =
    [r#"{"role":"user","content":"otter"}"#, r#"{"role":"user","content":"Cranes and 17 geckos, all of them"}"#];
/// System message for templates that require one.
const PROBE_SYSTEM: &str = r#"{"role":"system","content":"You are a heron."},"#;

/// A defect of a chat template.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum TemplateFault {
    /// It renders nothing but white space.
    #[error("renders nothing")]
    Empty,
    /// Its output does not depend on message contents in any format.
    #[error("renders nothing of what is said")]
    IgnoresContent,
    /// It fails for every probe conversation.
    #[error("fails with {0:?}")]
    Fails(Box<str>),
}

impl TemplateFault {
    /// Probes the model's template, which `render` renders. Returns `None` if there is no fault.
    pub(crate) fn probe(render: impl Fn(&ChatBody) -> Result<String, PrefixError>) -> Option<Self> {
        let plain = Self::compare_probes(&render, "");
        let Err(error) = plain else { return plain.ok().flatten() };
        match Self::compare_probes(&render, PROBE_SYSTEM) {
            Ok(fault) => fault,
            Err(_) => Some(Self::Fails(error.to_string().chars().take(MAX_MESSAGE_CHARS).collect())),
        }
    }

    fn compare_probes(
        render: impl Fn(&ChatBody) -> Result<String, PrefixError>,
        before: &str,
    ) -> Result<Option<Self>, PrefixError> {
        let prompt = |said: &str| {
            let body = format!(r#"{{"messages":[{before}{said}]}}"#);
            render(&ChatBody::parse(body.as_bytes())?)
        };
        let [one, other] = [prompt(PROBE_MESSAGES[0])?, prompt(PROBE_MESSAGES[1])?];
        Ok(match one == other {
            true if one.trim().is_empty() => Some(Self::Empty),
            true => Some(Self::IgnoresContent),
            false => None,
        })
    }

    /// Returns whether the template renders prompts that do not depend on the conversation. A template that fails
    /// renders none.
    pub(crate) fn ignores_content(&self) -> bool {
        !matches!(self, Self::Fails(_))
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::{
        ExtraPromptInputs, FallbackReason, ModelFiles, ModelTokenizer, ModelTokenizerSource, PromptIdentity,
        PromptResolver, PromptResolverOptions, PromptWorkLimits,
    };

    fn files(model: &str) -> ModelFiles<'static> {
        ModelFiles::read(&Path::new(env!("CARGO_MANIFEST_DIR")).join(model)).unwrap()
    }

    fn of_template(template: &str) -> ModelTokenizer {
        let chat_template = Some(template.as_bytes().to_vec().into());
        let files = ModelFiles { chat_template, ..files("../../configs/models/tiny") };
        ModelTokenizer::load(ModelTokenizerSource::Files(files)).unwrap()
    }

    fn fault(template: &str) -> Option<TemplateFault> {
        of_template(template).template_fault().cloned()
    }

    #[test]
    fn empty_template_is_distinguished_from_one_that_ignores_content() {
        assert_eq!(fault(""), Some(TemplateFault::Empty));
        assert_eq!(fault("{% for m in messages %}\n{{ m.contents }}{% endfor %}\n"), Some(TemplateFault::Empty));
        assert_eq!(fault("{% for m in messages %}<{{ m.role }}>{% endfor %}"), Some(TemplateFault::IgnoresContent));
    }

    #[test]
    fn template_that_always_fails_is_reported_with_its_message() {
        let Some(TemplateFault::Fails(message)) = fault("{{ raise_exception('no such luck') }}") else { panic!() };
        assert!(message.contains("no such luck"), "{message}");
    }

    #[test]
    fn content_may_be_rendered_in_any_form() {
        for shown in ["m.content | upper", "m.content | reverse", "m.content[:2] | title", "m.content | length"] {
            assert_eq!(fault(&format!("{{% for m in messages %}}{{{{ {shown} }}}}{{% endfor %}}")), None, "{shown}");
        }
    }

    #[test]
    fn template_may_refuse_or_require_a_role() {
        let refuses = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}{{ m.content }}{% endfor %}";
        let wants =
            "{% if messages[0].role != 'system' %}{{ raise_exception('no') }}{% endif %}{{ messages[1].content }}";
        assert_eq!([fault(refuses), fault(wants)], [None, None]);
    }

    #[test]
    fn committed_templates_have_no_fault() {
        let folders = std::fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/models")).unwrap();
        for folder in folders {
            let template = std::fs::read_to_string(folder.unwrap().path().join("chat_template.jinja"));
            let Ok(template) = template else { continue };
            assert_eq!(fault(&template), None, "{template}");
        }
        let none = ModelFiles { chat_template: None, ..files("../../configs/models/tiny") };
        assert_eq!(
            ModelTokenizer::load(ModelTokenizerSource::Files(none)).unwrap().template_fault(),
            None,
            "there is none"
        );
    }

    #[test]
    fn conversations_with_a_constant_rendering_fall_back_to_their_bytes() {
        let text = Some(std::sync::Arc::new(of_template("You are kind.")));
        let namespace = vocabulary::ModelNamespace { model: "m".into(), revision: "".into(), tokenizer: "".into() };
        let (seed, block) = (vocabulary::HashSeed(0), vocabulary::Tokens(4));
        let identifier = PromptResolver::new(PromptResolverOptions {
            namespace,
            seed,
            block_size: block,
            text,
            limits: PromptWorkLimits::default(),
        });
        let known = |said: &str| {
            identifier.resolve_chat(format!(r#"{{"messages":[{said}]}}"#).as_bytes(), ExtraPromptInputs::default())
        };
        let [one, other] = PROBE_MESSAGES.map(known);
        assert_eq!(one.identity, PromptIdentity::Fallback(FallbackReason::TemplateError));
        assert_ne!(one.chain.ids, other.chain.ids);
        assert!(identifier.text().unwrap().incremental_rendering().is_none());
    }
}
