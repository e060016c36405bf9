/* One line for the administrator: syslog's authpriv, or a small file where no syslog listens. */
#ifndef TP_AUDIT_H
#define TP_AUDIT_H

/* `folder` holds the file helper.log; it is used only where /dev/log does not answer. */
void tp_audit_open(const char *folder, const char *name);
void tp_audit(const char *format, ...) __attribute__((format(printf, 1, 2)));

#endif
