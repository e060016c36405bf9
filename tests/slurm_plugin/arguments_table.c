/* Prints what arguments.c makes of this program's arguments, which are those of a line in plugstack.conf. */
#include <stdio.h>

#include "arguments.h"

int main(int count, char **words)
{
    struct tp_arguments site;

    tp_arguments_read(count - 1, words + 1, &site);
    printf("%u %u %d %s %s\n%s\n", site.max_spares, site.max_drain, site.helper, tp_enlarger_name(site.enlarger),
           site.confirm ? site.confirm : "-", site.fault);
    return 0;
}
